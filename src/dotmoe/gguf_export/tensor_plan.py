"""One tensor of a GGUF, described before it is made, and made some rows at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType
from jaxtyping import Int
from torch import Tensor

from dotmoe.checkpoint.tensors import Tensors
from dotmoe.gguf_export.weight_types import Role, WeightType, stored_bytes, stored_type

_BLOCK_WEIGHTS = 1 << 24
"""Weights that are converted at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufTensor:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    """As in torch, rows last; GGUF lists it backwards."""
    role: Role
    rows: Callable[[], Iterator[Tensor]]
    """Makes the tensor on the CPU as blocks of whole rows, [rows, row length], in order."""

    def kind(self, weights: WeightType) -> GGMLQuantizationType:
        """Number format it is stored in."""
        return stored_type(self.role, self.shape[-1], weights)

    def num_bytes(self, weights: WeightType) -> int:
        """Bytes in the file."""
        return stored_bytes(prod(self.shape), self.kind(weights))


def whole(name: str, tensor: Tensor, role: Role = "exact") -> GgufTensor:
    """A tensor that is there already."""
    return GgufTensor(
        name=name,
        shape=tuple(tensor.shape),
        role=role,
        rows=lambda: iter([tensor.reshape(-1, tensor.shape[-1])]),
    )


def carried(
    tensors: Tensors,
    source: str,
    name: str,
    role: Role,
    order: Int[Tensor, " R"] | None = None,
) -> GgufTensor:
    """A dense tensor, its rows (of a bias: its entries) in another order if one is given."""
    shape, _ = tensors.describe(source)

    def rows() -> Iterator[Tensor]:
        tensor = tensors.read(source)
        if tensor.dim() == 1:
            yield (tensor if order is None else tensor[order])[None]
            return
        indices = torch.arange(len(tensor)) if order is None else order
        for part in _parts(indices, tensor.shape[1]):
            yield tensor[part]

    return GgufTensor(name=name, shape=shape, role=role, rows=rows)


def gate_or_up(
    tensors: Tensors,
    source: str,
    name: str,
    neurons: Int[Tensor, "..."],
    size: int | None = None,
) -> GgufTensor:
    """Rows of a gate or up projection: [neurons, D], or [E, S, D] for neurons [E, S].

    Args:
        tensors: The dense checkpoint.
        source: The projection, [N, D].
        name: Name in the GGUF.
        neurons: Which rows, in order.
        size: Rows to write; zeros follow after the last neuron.
    """
    (_, width), dtype = tensors.describe(source)
    shape = tuple(neurons.shape) if size is None else (size,)
    missing = prod(shape) - neurons.numel()

    def rows() -> Iterator[Tensor]:
        for part in _parts(neurons.flatten(), width):
            yield tensors.read(source)[part]
        if missing:
            yield torch.zeros(missing, width, dtype=dtype)

    return GgufTensor(name=name, shape=(*shape, width), role="matrix", rows=rows)


def down(
    tensors: Tensors,
    source: str,
    name: str,
    neurons: Int[Tensor, "..."],
    size: int | None = None,
) -> GgufTensor:
    """Columns of a down projection: [D, neurons], or [E, D, S] for neurons [E, S].

    Args:
        tensors: The dense checkpoint.
        source: The projection, [D, N].
        name: Name in the GGUF.
        neurons: Which columns, in order.
        size: Columns to write; zeros follow after the last neuron.
    """
    (width, _), _ = tensors.describe(source)
    length = neurons.shape[-1] if size is None else size

    def rows() -> Iterator[Tensor]:
        for columns in neurons if neurons.dim() == 2 else neurons[None]:
            part = tensors.read(source).index_select(1, columns)
            yield F.pad(part, (0, length - len(columns)))

    return GgufTensor(
        name=name, shape=(*neurons.shape[:-1], width, length), role="matrix", rows=rows
    )


def _parts(indices: Int[Tensor, " R"], width: int) -> Iterator[Tensor]:
    """Numbers of rows of that width, as many at a time as are converted at once."""
    step = max(1, _BLOCK_WEIGHTS // width)
    for start in range(0, len(indices), step):
        yield indices[start : start + step]
