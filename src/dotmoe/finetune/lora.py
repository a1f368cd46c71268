"""Low-rank adapters on experts and attention, by PEFT."""

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from dotmoe.artifacts import DenseModel
from dotmoe.distributed import own_rows
from dotmoe.errors import UserError
from dotmoe.finetune.config import FinetuneConfig
from dotmoe.moe.sparse_ffn import EXPERT_WEIGHTS
from dotmoe.training.task import local_part

ADAPTED = ".base_layer"
"""In the name of a module that has an adapter, for each."""

_FIRST, _SECOND = "lora_A", "lora_B"
_ATTENTION = r".*\.self_attn\.(q|k|v|o|qkv)_proj"
_DENSE_FFN = r".*\.mlp\.(gate|up|gate_up|down)_proj"


class Adapters:
    """The adapters of one model."""

    def __init__(self, tuner: Any) -> None:
        self._tuner = tuner

    @torch.no_grad()
    def start(self, seed: int) -> None:
        """Set first factors to uniform random numbers as PEFT does, second ones to zero.

        They are a function of the seed and of a factor's name, so the same on any number of ranks.
        """
        for name, parameter in self._tuner.model.named_parameters():
            part = local_part(parameter)
            if _SECOND in name:
                part.zero_()
            elif _FIRST in name:
                digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
                whole = nn.init.kaiming_uniform_(
                    torch.empty(parameter.shape), a=math.sqrt(5), generator=generator
                )
                part.copy_(whole[own_rows(parameter)])

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside, the model computes without them."""
        self._tuner.disable_adapter_layers()
        try:
            yield
        finally:
            self._tuner.enable_adapter_layers()

    def merge(self) -> None:
        """Add them to the weights they adapt, and take them out of the model."""
        self._tuner.merge_and_unload()


def require_peft() -> None:
    """Refuse to go on without the package.

    Raises:
        UserError: It is not installed.
    """
    if find_spec("peft") is None:
        raise UserError(
            "train is lora, which needs the peft package. Install it by "
            "`pip install 'dotmoe[lora]'`, or choose everything or router."
        )


def add_adapters(dense: DenseModel, config: FinetuneConfig, seed: int) -> Adapters:
    """Put adapters into `dense.model`, whose own weights stay frozen.

    An expert has an adapter for each of its three projections; PEFT adds their products to the
    experts' weights once a forward pass, which costs 6 r N D multiplications and additions a layer
    whatever the number of tokens, and memory for one more copy of the layer's experts. There is no
    dropout: adapters of stacked experts can have none, and a step must be the same when repeated.

    Args:
        dense: A model whose split FFNs are `SparseFFN`.
        config: Rank and alpha.
        seed: See `Adapters.start`; adapters on the meta device are not started.
    """
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel

    experts = [
        name
        for name, _ in dense.model.named_parameters()
        if name.rpartition(".")[2] in EXPERT_WEIGHTS
    ]
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=f"{_ATTENTION}|{_DENSE_FFN}",
        target_parameters=experts,
    )
    with torch.random.fork_rng(_gpus(dense)):
        adapters = Adapters(LoraModel(dense.model, lora, "default"))
    for name, parameter in dense.model.named_parameters():
        if _FIRST in name or _SECOND in name:
            parameter.data = parameter.data.float()  # PEFT gives them the dtype of the weights
    if dense.device.type != "meta":
        adapters.start(seed)
    return adapters


def _gpus(dense: DenseModel) -> list[int]:
    index = dense.device.index
    return [] if dense.device.type != "cuda" or index is None else [index]
