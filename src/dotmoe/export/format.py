"""The one idea of a format: what it holds, how it weights experts, its header, tensors and check.

Transformers checkpoints and GGUF files are members alike; all are listed in `export.FORMATS`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from dotmoe.checkpoint.tensors import DTYPES, Tensors
from dotmoe.granularity import GROUPED_MATMUL_BYTES, Granularity, targets_of
from dotmoe.layout import ExpertLayout
from dotmoe.models.dense import DenseModel
from dotmoe.models.family import Multipliers
from dotmoe.options import above, at_least
from dotmoe.progress import Update, no_update

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
class ExportConfig:
    """What is written, and how carefully it is checked."""

    format: str = "auto"
    """Stock architecture to write: glm4_moe, mixtral, qwen2_moe, qwen3_moe, granitemoe, flex_olmo,
    or auto: glm4_moe where it can hold the model, else the family's native twin. Experts made of
    heads have dotmoe alone, which only Transformers runs, with code of its own. From a finished
    run `dotmoe export` also writes gguf, gguf_glm4moe, gguf_llama and gguf_dense."""
    export_dtype: Literal["source", "float32", "bfloat16"] = "source"
    """Dtype of the written weights. `source` keeps that of every dense tensor, bit for bit; float16
    cannot hold the scaled routers and must be given another."""
    max_shard_gib: Annotated[float, above(0)] = 4.0
    """Largest weight file, in GiB, above 0."""
    scale_tokens: Annotated[int, at_least(1)] = 2048
    """Tokens of text from which the scale of the routers is chosen, at least 1."""
    verify_tokens: Annotated[int, at_least(1)] = 512
    """Tokens of text on which the export is compared with the masked dense model, at least 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufConfig(ExportConfig):
    """With what is special to GGUF files."""

    gguf_type: Literal["f32", "f16", "bf16", "q8_0", "q4_0"] = "f16"
    """Number format of a GGUF's matrices."""
    gguf_tokenizer: Literal["auto", "none"] = "auto"
    """auto: the model's tokenizer goes into the GGUF; none: it will take token ids only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gating:
    """Weights of the experts of a token, and the constant that the export sets against them."""

    score: Literal["softmax", "sigmoid", "softmax_of_chosen"]
    """Softmax or sigmoid over all experts before the k are chosen, or softmax over the chosen."""
    renormalised: bool
    """Weights are divided by their sum over the chosen."""
    constant: float
    """1, 2, k or E: times the weight of a chosen expert it is 1 but for the logits times 2^-p. It
    is folded into the down projections, or is a value that the file states."""
    cast_to_model_dtype: bool = False
    """Transformers rounds the weights to the dtype of the model."""
    logits_in_model_dtype: bool = False
    """Some runtime computes the logits in the dtype of the model, where many of them tie."""
    only_in: str | None = None
    """The one runtime that runs such files; None: all may."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """Everything a format may look at."""

    dense: DenseModel
    tensors: Tensors
    """The dense checkpoint's files, the only source of weights."""
    layout: ExpertLayout
    """Routers are exact in `dtype`."""
    exponents: Mapping[int, int]
    """p of each split layer: its router is written as 2^-p W_r."""
    dtype: torch.dtype
    """Of routers and experts, and of what the dense model lacks."""
    config: GgufConfig
    source: str
    """Name of the dense model that the work began with."""
    on_progress: Update = no_update
    """Told tensors written, then layers verified."""

    @property
    def granularity(self) -> Granularity:
        """Of the layout."""
        return self.layout.granularity

    @property
    def keeps_dtypes(self) -> bool:
        """Every dense tensor keeps the dtype in which it is stored; else all take `dtype`."""
        return self.config.export_dtype == "source"

    def dtype_of(self, name: str) -> torch.dtype:
        """Dtype in which a dense tensor is written."""
        return self.tensors.describe(name)[1] if self.keeps_dtypes else self.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Holds:
    """Features of a dense decoder that a format has a place for; see `DecoderTraits`."""

    biases: tuple[str, ...] = ("none",)
    """Attention biases: none, on query, key and value (qkv), on the output (o), or on all."""
    qk_norm: tuple[str, ...] = ("none",)
    norms_after: bool = False
    multipliers: bool = False
    any_head_dim: bool = True
    """The head width need not be hidden_size / heads."""
    sliding_window: bool = False
    """Sliding attention windows; without, the context is cut to the window."""
    shared_expert: bool = False
    dense_layers: bool = False
    rope: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn")
    """Kinds of rotary embedding that it computes as the dense model does."""


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
    scales_routers: bool = True
    """Whether runtimes weight experts by their logits, which scaled routers undo."""

    def refusal(
        self, dense: DenseModel, granularity: Granularity, dtype: torch.dtype
    ) -> str | None:
        """Why such a split cannot be exported exactly (one sentence with the remedy), or None."""
        return unsupported_reason(self, dense, granularity) or unsupported_size(
            self.name, dense, granularity, dtype
        )

    @abstractmethod
    def gating(self, granularity: Granularity) -> Gating:
        """How the runtimes of this format weight the chosen experts, if it `scales_routers`."""

    @abstractmethod
    def exactness(self, conversion: Conversion) -> str:
        """What is exact and what is not, in a clause."""

    def context(self, dense: DenseModel) -> int:
        """Longest context in which the export computes what the dense model does, in tokens."""
        context, window = dense.widths.context, dense.family.traits(dense.config).sliding_window
        return context if self.holds.sliding_window or window is None else min(window, context)

    def notes(self, conversion: Conversion) -> list[str]:
        """What a user of the exported model must know, one sentence each."""
        context, whole = self.context(conversion.dense), conversion.dense.widths.context
        if context == whole:
            return []
        return [
            f"The dense model attends through a sliding window of {context} tokens, which "
            f"{self.name} has not: its context is lowered from {whole} to the window, up to which "
            "the two are the same."
        ]

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
    def write(self, conversion: Conversion, folder: Path) -> list[str]:
        """Write header, tensors and tokenizer into a folder; returns the names of weight files."""

    @abstractmethod
    def check(
        self, conversion: Conversion, folder: Path, tokens_BT: Int[Tensor, "B T"]
    ) -> tuple[dict[str, Any], list[str]]:
        """Compare the written folder with the masked dense model.

        Returns:
            What was measured, for `ExportRecord.verification`; a sentence for each limit exceeded.

        Raises:
            VerificationError: The folder cannot be read as what it should be.
        """

    @abstractmethod
    def with_active_experts(self, folder: Path, active_experts: int) -> tuple[Path, Path]:
        """Write what states k anew; returns the new file and the one of the folder to replace."""


def unsupported_reason(form: Format, dense: DenseModel, granularity: Granularity) -> str | None:
    """Why a format has no place for a model split that way (one sentence), or None."""
    holds, config = form.holds, dense.config
    traits = dense.family.traits(config)
    on_qkv, on_output = "qkv" * traits.qkv_bias, "o" * traits.output_bias
    rope = config.rope_parameters.get("rope_type", "default")
    factors, places = ("none", "constant"), ("before", "after")
    usual = config.hidden_size // config.num_attention_heads
    shared, leading = granularity.shared_size, granularity.first_dense_layers
    features: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "attention biases": (on_qkv + on_output or "none", holds.biases),
        "query and key norms": (traits.qk_norm, holds.qk_norm),
        "norms beside attention and FFN": (
            places[traits.norms_after],
            (places[holds.norms_after],),
        ),
        "multipliers": (
            factors[traits.multipliers != Multipliers()],
            factors[: 1 + holds.multipliers],
        ),
        "head_dim": (traits.head_dim, (traits.head_dim if holds.any_head_dim else usual,)),
        "rope_type": (rope, holds.rope),
        "neurons in a shared expert": (shared, (shared if holds.shared_expert else 0,)),
        "targets": (targets_of(granularity), ("ffn",)),
        "leading dense layers": (leading, (leading if holds.dense_layers else 0,)),
    }
    for what, (found, taken) in features.items():
        if found not in taken:
            kinds = " or ".join(map(repr, taken))
            return f"{dense.source} has {what} {found!r}, but {form.name} takes only {kinds}."
    if rope == "dynamic" and form.context(dense) < dense.widths.context:
        return (
            f"{dense.source} has rope_type 'dynamic' together with a sliding window; both depend "
            f"on max_position_embeddings, which {form.name} must lower."
        )
    return None


def unsupported_size(
    name: str, dense: DenseModel, granularity: Granularity, dtype: torch.dtype
) -> str | None:
    """Why stock Transformers could not run experts of that size, or None."""
    if granularity.num_experts < 2:
        return f"The layout has one expert a layer, but {name} needs at least 2."
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
