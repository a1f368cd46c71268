"""A dense checkpoint, loaded or only described, and a text taken through its layers."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from dotmoe.models.family import Family, Widths, widths_of

TOKENS_AT_ONCE = 4096
"""Tokens of a `Stream` whose activations exist at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseModel:
    """A dense checkpoint, frozen, in evaluation mode."""

    model: nn.Module
    """The Transformers causal language model; on the meta device where it is only described."""
    tokenizer: Any
    """Its tokenizer (a `PreTrainedTokenizerBase`)."""
    family: Family
    folder: Path
    """Local folder that holds config, safetensors and tokenizer files."""
    source: str
    """What the user called it: a folder, a GGUF file or a hub name."""
    revision: str | None
    """Commit of a hub checkpoint, if it came from there."""

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return next(self.model.parameters()).device

    @property
    def config(self) -> Any:
        """Its Hugging Face config."""
        return self.model.config

    @property
    def widths(self) -> Widths:
        """Its sizes."""
        return widths_of(self.config)


class Stream:
    """What goes from one decoder layer to the next, [B, T, D], on the CPU.

    Layers are called as the model's own trunk calls them, and need not be the model's any more.
    """

    def __init__(
        self, dense: DenseModel, tokens_BT: Tensor, parts: Sequence[slice] | None = None
    ) -> None:
        """Start before the first layer; rows run in `parts`, in order, default 4,096 tokens."""
        num_rows, seq_len = tokens_BT.shape
        rows = max(1, TOKENS_AT_ONCE // seq_len)
        self.parts = parts or [slice(row, row + rows) for row in range(0, num_rows, rows)]
        self._device, self._layers = dense.device, list(dense.family.layers(dense.model))
        self._arguments = _arguments(dense, tokens_BT[:1])
        embed: Any = dense.model.get_input_embeddings()  # type: ignore[operator]
        factor = dense.family.traits(dense.config).multipliers.embedding
        parts_BT = [tokens_BT[part].to(self._device) for part in self.parts]
        self.hidden_BTD = torch.cat([(embed(part_BT) * factor).cpu() for part_BT in parts_BT])

    def after(self, index: int, part: slice) -> Tensor:
        """Some rows behind a layer, on the model's device; the stream stays before it."""
        hidden_BTD = self.hidden_BTD[part].to(self._device)
        output: Tensor = self._layers[index](hidden_BTD, **self._arguments[index])
        return output

    def advance(self, index: int) -> None:
        """Take the stream through a layer."""
        for part in self.parts:
            self.hidden_BTD[part] = self.after(index, part).cpu()

    def clone(self) -> Self:
        """Another stream at the same place."""
        other = copy.copy(self)
        other.hidden_BTD = self.hidden_BTD.clone()
        return other


def _arguments(dense: DenseModel, tokens_1T: Tensor) -> list[dict[str, Any]]:
    """What the trunk gives each decoder layer besides the stream: positions and masks."""
    found: list[dict[str, Any]] = []
    hooks = [
        layer.register_forward_pre_hook(
            lambda layer, args, kwargs: found.append(kwargs), with_kwargs=True
        )
        for layer in dense.family.layers(dense.model)
    ]
    try:
        dense.family.trunk(dense.model)(input_ids=tokens_1T.to(dense.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def meta_model(config: Any, dtype: torch.dtype | None = None) -> nn.Module:
    """The stock model of a config, frozen, without storage, in `dtype` or that of the config."""
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=dtype or config.dtype
        )
    return model.requires_grad_(False).eval()


def compute_constants(model: nn.Module, device: torch.device) -> None:
    """Make the modules anew that hold what no checkpoint stores: rotary frequencies."""
    config = model.config
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            buffers = {key for key, _ in child.named_buffers(recurse=False)}
            if buffers - child.state_dict().keys():
                setattr(parent, name, type(child)(config).to(device))


def num_parameters(module: nn.Module) -> int:
    """Parameters of a module; a tied head is counted once."""
    return sum(parameter.numel() for parameter in module.parameters())
