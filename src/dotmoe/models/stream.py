"""The hidden states between decoder layers, passed on layer by layer."""

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn

from dotmoe.models.dense_model import DenseModel

TOKENS_AT_ONCE = 4096
"""Tokens of a `Stream` whose activations exist at once."""


class Stream:
    """The hidden states between two decoder layers, [B, T, D], on the CPU.

    Its maker may move `hidden_BTD` to another device, where it stays. Layers are called as the
    model's trunk calls them, even if the model no longer has them.
    """

    def __init__(
        self, dense: DenseModel, tokens_BT: Tensor, parts: Sequence[slice] | None = None
    ) -> None:
        """Start before the first layer; rows run in `parts`, by default of up to 4,096 tokens."""
        num_rows, seq_len = tokens_BT.shape
        rows = max(1, TOKENS_AT_ONCE // seq_len)
        self.parts = parts or [slice(row, row + rows) for row in range(0, num_rows, rows)]
        self._device = dense.device
        self._layers = list(dense.family.layers(dense.model))
        self._arguments = _arguments(dense, tokens_BT[:1])
        embed: Any = dense.model.get_input_embeddings()  # type: ignore[operator]
        factor = dense.traits.multipliers.embedding
        parts_BT = [tokens_BT[part].to(self._device) for part in self.parts]
        self.hidden_BTD = torch.cat([(embed(part_BT) * factor).cpu() for part_BT in parts_BT])

    def after(self, index: int, part: slice) -> Tensor:
        """Hidden states of some rows after a layer, on its device; the stream does not advance."""
        hidden_BTD = self.hidden_BTD[part].to(self._device, non_blocking=True)
        output: Tensor = self._layers[index](hidden_BTD, **self._arguments[index])
        return output

    def advance(self, index: int) -> None:
        """Run the stream through a layer."""
        for part in self.parts:
            self.hidden_BTD[part] = self.after(index, part)

    def clone(self) -> Self:
        """A copy of the stream at the same layer."""
        other = copy.copy(self)
        other.hidden_BTD = self.hidden_BTD.clone()
        return other


def _arguments(dense: DenseModel, tokens_1T: Tensor) -> list[dict[str, Any]]:
    """Keyword arguments that the trunk passes to each decoder layer: positions and masks."""
    arguments: list[dict[str, Any]] = []

    def keep(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        arguments.append(kwargs)

    with ExitStack() as hooks:
        for layer in dense.family.layers(dense.model):
            hooks.enter_context(layer.register_forward_pre_hook(keep, with_kwargs=True))
        dense.model.get_submodule("model")(input_ids=tokens_1T.to(dense.device), use_cache=False)
    return arguments
