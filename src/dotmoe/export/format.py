"""The one idea of a format: what it holds, how it weights experts, its header, tensors and check.

Transformers checkpoints and GGUF files are members alike; all are listed in `export.FORMATS`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from dotmoe.checkpoint.tensors import DTYPES, Tensors
from dotmoe.granularity import GROUPED_MATMUL_BYTES, Granularity
from dotmoe.layout import ExpertLayout
from dotmoe.models.dense import DenseModel
from dotmoe.models.traits import DecoderTraits, Multipliers

if TYPE_CHECKING:
    from dotmoe.export import ExportConfig

BLOCKS = {
    "F64": (1, 8),
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
}
"""Number formats of files: weights that are stored together, and bytes for them."""
STORED = {dtype: name for name, dtype in DTYPES.items()}
"""Name of a dtype in a file."""
EXACT_ROPE = ("default", "linear", "dynamic", "llama3", "yarn")
"""Rotary embeddings that the exported architectures compute as the dense one does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One tensor to be written; its size is known before its content is made."""

    name: str
    shape: tuple[int, ...]
    stored: str
    """Number format in the file, a key of `BLOCKS`."""
    make: Callable[[], Tensor]
    """Reads or builds the tensor on the CPU; whoever writes it rounds it to `stored`, once."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        weights, size = BLOCKS[self.stored]
        return prod(self.shape) // weights * size


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufConfig:
    """What is special to GGUF files."""

    type: Literal["f32", "f16", "bf16", "q8_0", "q4_0"] = "f16"
    """Number format of the matrices."""
    tokenizer: Literal["auto", "none"] = "auto"
    """auto: the dense model's, where llama.cpp has the like; none: token ids only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gating:
    """Weights of the experts of a token, and the constant that the export sets against them.

    `constant` times the weight of a chosen expert is 1 but for the logits times 2^-p. It is folded
    into the down projections, or is a value that the file states.
    """

    score: Literal["softmax", "sigmoid", "softmax_of_chosen"]
    """Softmax or sigmoid over all experts before the k are chosen, or softmax over the chosen."""
    renormalised: bool
    """Weights are divided by their sum over the chosen."""
    constant: float
    """1, 2, k or E; see above."""
    cast_to_model_dtype: bool = False
    """Some runtime rounds the weights to the dtype of the model."""
    logits_in_model_dtype: bool = False
    """Some runtime computes the logits in the dtype of the model, where many of them tie."""
    only_in: str | None = None
    """The one runtime that runs such files; None: all may."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """Everything a format may look at."""

    dense: DenseModel
    """The dense model; only what it says of itself is used."""
    tensors: Tensors
    """The dense checkpoint's files, the only source of weights."""
    layout: ExpertLayout
    """Routers are exact in `dtype`."""
    exponents: Mapping[int, int]
    """p of each split layer: its router is written as 2^-p W_r."""
    dtype: torch.dtype
    """Of routers and experts, and of what the dense model lacks."""
    keeps_dtypes: bool = True
    """Every dense tensor keeps the dtype in which it is stored; else all take `dtype`."""
    source: str = ""
    """Name of the dense model that the work began with."""
    gguf: GgufConfig = GgufConfig()

    @property
    def granularity(self) -> Granularity:
        """E, s, k, shared neurons and dense layers of the layout."""
        return self.layout.granularity

    def dtype_of(self, name: str) -> torch.dtype:
        """Dtype in which a dense tensor is written."""
        _, stored = self.tensors.describe(name)
        return stored if self.keeps_dtypes else self.dtype

    @property
    def is_rounded(self) -> bool:
        """Whether weights are written in another dtype than they are stored in."""
        stored = self.tensors.describe(self.dense.family.ffn_tensor(0, "gate"))[1]
        return not self.keeps_dtypes and stored != self.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Holds:
    """Features of a dense decoder that a format has a place for."""

    biases: tuple[str, ...] = ("none",)
    """Attention biases: none, on query, key and value (qkv), or on the output too (qkvo)."""
    qk_norm: tuple[str, ...] = ("none",)
    """RMSNorms of queries and keys: none, head or full."""
    norms_after: bool = False
    """RMSNorms stand after attention and FFN instead of before."""
    multipliers: bool = False
    """Constant factors, as Granite has them."""
    any_head_dim: bool = True
    """The head width need not be hidden_size / heads."""
    sliding_window: bool = False
    """Sliding attention windows; without, the context is cut to the window."""
    shared_expert: bool = False
    """Neurons that are always on beside the routed ones."""
    dense_layers: bool = False
    """Leading layers that are not split."""
    rope: tuple[str, ...] = EXACT_ROPE
    """Kinds of rotary embedding."""


class Format(ABC):
    """A format to export to."""

    name: str
    servers: tuple[str, ...]
    """Software that runs it without further code."""
    holds: Holds
    active_experts_key: str = "num_experts_per_tok"
    """Key of the header that holds k."""
    active_experts_editable: bool = False
    """Whether k may be changed after export."""
    exponent: int | None = None
    """p of every layer's router; None: chosen by layer from the router's logits."""
    splits: bool = True
    """Whether FFNs become experts; if not, it is the dense model in another container."""

    def refusal(
        self, dense: DenseModel, granularity: Granularity, dtype: torch.dtype
    ) -> str | None:
        """Why such a split cannot be exported exactly (one sentence with the remedy), or None."""
        return unsupported_reason(self, dense, granularity) or unsupported_size(
            self.name, dense, granularity, dtype
        )

    @abstractmethod
    def gating(self, granularity: Granularity) -> Gating:
        """How the runtimes of this format weight the chosen experts."""

    def exactness(self, conversion: Conversion) -> str:
        """What is exact and what is not, in a clause."""
        return "expert weights are the dense ones; gates 1 but for about 2^-11"

    def context(self, dense: DenseModel) -> int:
        """Longest context in which the export computes what the dense model does, in tokens."""
        context, window = dense.widths.context, dense.family.traits(dense.config).sliding_window
        return context if self.holds.sliding_window or window is None else min(window, context)

    def notes(self, conversion: Conversion) -> list[str]:
        """What a user of the exported model must know, one sentence each."""
        return []

    def details(self, conversion: Conversion) -> dict[str, Any]:
        """What goes on record of this container alone."""
        return {}

    @abstractmethod
    def header(self, conversion: Conversion) -> dict[str, Any]:
        """Content of config.json, or the metadata keys of a GGUF."""

    @abstractmethod
    def tensors(self, conversion: Conversion) -> Iterator[TensorSpec]:
        """The tensors in the order in which they are best read and written.

        Raises:
            UserError: The checkpoint lacks a tensor, or has one that the format has no place for.
        """

    @abstractmethod
    def write(self, conversion: Conversion, folder: Path, config: "ExportConfig") -> list[str]:
        """Write header, tensors and tokenizer into a folder; returns the names of weight files.

        Raises:
            UserError: The disk has, or turns out to have, too little room.
        """

    @abstractmethod
    def check(
        self, conversion: Conversion, folder: Path, tokens_BT: Int[Tensor, "B T"]
    ) -> tuple[Any, list[str]]:
        """Compare the written folder with the masked dense model.

        Returns:
            What was measured, a dataclass for `ExportRecord.verification`; and a sentence for each
            limit exceeded.

        Raises:
            VerificationError: The folder cannot be read as what it should be.
        """

    @abstractmethod
    def with_active_experts(self, folder: Path, active_experts: int) -> tuple[Path, Path]:
        """Write what states k anew; returns the new file and the one of the folder to replace."""


# --- what does not fit ------------------------------------------------------------------------


def biases_of(traits: DecoderTraits) -> str:
    """Attention biases of a model, as `Holds.biases` names them."""
    if traits.output_bias:
        return "qkvo" if traits.qkv_bias else "o"
    return "qkv" if traits.qkv_bias else "none"


def unsupported_reason(form: Format, dense: DenseModel, granularity: Granularity) -> str | None:
    """Why a format has no place for a model split that way (one sentence), or None."""
    name, holds, config = form.name, form.holds, dense.config
    traits = dense.family.traits(config)
    plain_head_dim = config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("rope_type", "default")
    complaints = {
        f"has attention biases of kind {biases_of(traits)!r}, but {name} has those of kind "
        f"{_either(holds.biases)}": biases_of(traits) not in holds.biases,
        f"has query and key norms of kind {traits.qk_norm!r}, but {name} has those of kind "
        f"{_either(holds.qk_norm)}": traits.qk_norm not in holds.qk_norm,
        f"has its norms {_place(traits.norms_after)} attention and FFN, but {name} has them "
        f"{_place(holds.norms_after)}": traits.norms_after != holds.norms_after,
        f"multiplies embeddings, residuals or logits by constants, which {name} does not": (
            traits.multipliers != Multipliers() and not holds.multipliers
        ),
        f"has heads of {traits.head_dim}, but {name} takes only hidden_size / heads = "
        f"{plain_head_dim}": traits.head_dim != plain_head_dim and not holds.any_head_dim,
        f"is split with a shared expert, which {name} has not": (
            granularity.shared_size > 0 and not holds.shared_expert
        ),
        f"keeps {granularity.first_dense_layers} leading layers dense, which {name} cannot": (
            granularity.first_dense_layers > 0 and not holds.dense_layers
        ),
        f"has a rotary embedding of rope_type {rope!r}, but {name} computes only "
        f"{', '.join(holds.rope)} exactly; choose a model without it": rope not in holds.rope,
        "has rope_type 'dynamic' together with a sliding window, and both depend on "
        f"max_position_embeddings, which {name} must lower; choose a model without the two": (
            rope == "dynamic" and form.context(dense) < dense.widths.context
        ),
    }
    for complaint, applies in complaints.items():
        if applies:
            return f"{dense.source} {complaint}."
    return None


def unsupported_size(
    name: str, dense: DenseModel, granularity: Granularity, dtype: torch.dtype
) -> str | None:
    """Why stock Transformers could not run experts of that size, or None."""
    if granularity.num_experts < 2:
        return (
            f"The layout has {granularity.num_experts} expert a layer, but the {name} router "
            "needs at least 2. Choose a smaller expert_size."
        )
    multiple = GROUPED_MATMUL_BYTES // dtype.itemsize
    sizes = {"expert_size": granularity.expert_size, "The model width": dense.widths.model}
    for what, size in sizes.items():
        if size % multiple:
            return (
                f"{what} is {size}, but in {str(dtype).removeprefix('torch.')} the grouped "
                f"matrix product that runs the experts takes multiples of {multiple} only. "
                "Choose such an expert_size, or another model."
            )
    return None


def _either(kinds: tuple[str, ...]) -> str:
    return " or ".join(map(repr, kinds))


def _place(after: bool) -> str:
    return "after" if after else "before"
