"""The contract of an output architecture: how a layout becomes the tensors of a stock MoE."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dotmoe.artifacts import DenseModel
from dotmoe.errors import UserError
from dotmoe.export.dense_tensors import DenseTensors
from dotmoe.export.gating import Gating
from dotmoe.granularity import Granularity
from dotmoe.layout import ExpertLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One tensor to be written; its size is known before its content is made."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]
    """Reads or builds the tensor, on the CPU, contiguous."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """Everything an output architecture may look at."""

    dense: DenseModel
    tensors: DenseTensors
    """The dense checkpoint's files, the only source of weights."""
    layout: ExpertLayout
    exponents: Mapping[int, int]
    """p of each split layer: its router is written as 2^-p W_r."""
    dtype: torch.dtype
    """Dtype of every written weight."""

    @property
    def granularity(self) -> Granularity:
        """E, s, k, shared neurons and dense layers of the layout."""
        return granularity_of(self.layout)


def granularity_of(layout: ExpertLayout) -> Granularity:
    """The split of a layout."""
    return Granularity(
        num_experts=layout.num_experts,
        expert_size=layout.expert_size,
        active_experts=layout.active_experts,
        shared_size=layout.shared_size,
        first_dense_layers=layout.first_dense_layers,
    )


def require_fit(dense: DenseModel, layout: ExpertLayout) -> None:
    """Refuse a layout of another model.

    Raises:
        UserError: Layers, FFN neurons or model width differ.
    """
    widths = dense.widths
    expected = (widths.layers, widths.ffn, widths.model)
    found = (layout.num_layers, layout.num_neurons, layout.router_LED.shape[2])
    if expected != found:
        raise UserError(
            f"The layout is for {found} layers, FFN neurons and model width, but {dense.source} "
            f"has {expected}. Use the layout of this model."
        )


class OutputArchitecture(Protocol):
    """A stock MoE architecture to export to. Members are listed in `OUTPUTS`."""

    name: str
    """What the format is called, as a rule the `model_type` of the exported config."""
    exactness: str
    """What is exact and what is not, in a clause."""
    experts_key: str
    """Config key that holds E."""
    active_experts_key: str
    """Config key that holds k."""
    active_experts_editable: bool
    """Whether k may be changed in the exported config and nowhere else."""
    block_has_shared: bool
    """Whether the output of a block contains that of the shared expert."""
    block_error: float
    """Largest median relative error of a block in float32, at the recommended router scale."""
    block_ratio: float
    """Largest block error below float32, in those of the masked FFN in the same dtype."""

    @property
    def servers(self) -> tuple[str, ...]:
        """Software that runs it without further code."""
        ...

    @property
    def required_keys(self) -> tuple[str, ...]:
        """Config keys without which some runtime silently computes something else."""
        ...

    def refusal(
        self, dense: DenseModel, granularity: Granularity, dtype: torch.dtype
    ) -> str | None:
        """Why such a split cannot be exported exactly (one sentence with the remedy), or None."""
        ...

    def gating(self, granularity: Granularity) -> Gating:
        """How the runtimes of this architecture weight the chosen experts."""
        ...

    def context(self, dense: DenseModel) -> int:
        """Longest context in which the export computes what the dense model does, in tokens."""
        ...

    def notes(self, dense: DenseModel, layout: ExpertLayout) -> list[str]:
        """What a user of the exported model must know, one sentence each."""
        ...

    def config(self, conversion: Conversion) -> dict[str, Any]:
        """Content of config.json."""
        ...

    def tensors(self, conversion: Conversion) -> Iterator[TensorSpec]:
        """The tensors in the order in which they are best read and written.

        Raises:
            UserError: The checkpoint lacks a tensor, has one that the architecture has no place
                for, or a router that is not exact in the written dtype.
        """
        ...

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The FFN blocks of a reloaded model, by layer; each maps [B, T, D] to [B, T, D]."""
        ...

    def chosen_experts(self, block: nn.Module, x_TD: Tensor) -> Tensor:
        """Numbers of the k experts that a reloaded block runs for each token, [T, K]."""
        ...

    def set_active_experts(self, model: nn.Module, layout: ExpertLayout) -> None:
        """Give a reloaded model the layout's k, as editing its config before loading would.

        Only where `active_experts_editable`.
        """
        ...
