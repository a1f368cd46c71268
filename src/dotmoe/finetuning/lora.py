"""Low-rank adapters on experts and attention, by PEFT."""

import hashlib
import math
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from dotmoe.distributed import local_part, own_rows
from dotmoe.errors import UserError
from dotmoe.moe.sparse import EXPERT_WEIGHTS

ADAPTED = ".base_layer"
"""In the name of a module that has an adapter, for each."""

_FIRST, _SECOND = "lora_A", "lora_B"
_ATTENTION = r".*\.self_attn\.(q|k|v|o|qkv)_proj"
_DENSE_FFN = r".*\.mlp\.(gate|up|gate_up|down)_proj"


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


def add_adapters(model: nn.Module, *, rank: int, alpha: int) -> Any:
    """Put adapters into a model on the meta device, whose own weights stay frozen.

    An expert has an adapter for each of its three projections; PEFT adds their products to the
    experts' weights once a forward pass, which costs 6 r N D multiplications and additions a layer
    whatever the number of tokens, and memory for one more copy of the layer's experts. There is no
    dropout: adapters of stacked experts can have none, and a step must be the same when repeated.

    Returns:
        PEFT's tuner, which can disable the adapters and merge them.
    """
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel

    names = [name for name, _ in model.named_parameters()]
    lora = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=f"{_ATTENTION}|{_DENSE_FFN}",
        target_parameters=[name for name in names if name.rpartition(".")[2] in EXPERT_WEIGHTS],
    )
    tuner = LoraModel(model, lora, "default")
    for name, parameter in model.named_parameters():
        if _FIRST in name or _SECOND in name:
            parameter.data = parameter.data.float()  # PEFT gives them the dtype of the weights
    return tuner


@torch.no_grad()
def start_adapters(model: nn.Module, seed: int) -> None:
    """Set first factors to uniform random numbers as PEFT does, second ones to zero.

    They are a function of the seed and of a factor's name, so the same on any number of ranks.
    """
    for name, parameter in model.named_parameters():
        part = local_part(parameter)
        if _SECOND in name:
            part.zero_()
        elif _FIRST in name:
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
            values = nn.init.kaiming_uniform_(
                torch.empty(parameter.shape), a=math.sqrt(5), generator=generator
            )
            part.copy_(values[own_rows(parameter)])
