"""What an output architecture can hold, and why a model does not fit."""

from dataclasses import dataclass
from typing import Literal

import torch

from dotmoe.artifacts import DenseModel
from dotmoe.export.decoder_config import rope_refusal
from dotmoe.granularity import GROUPED_MATMUL_BYTES, Granularity
from dotmoe.models.traits import DecoderTraits, Multipliers

Biases = Literal["none", "qkv", "qkvo"]
QKNorm = Literal["none", "head", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Holds:
    """Features of a dense decoder that an architecture has a place for."""

    biases: tuple[Biases, ...] = ("none",)
    """Attention biases: none, on query, key and value, or on the output projection too."""
    qk_norm: tuple[QKNorm, ...] = ("none",)
    """RMSNorms of queries and keys."""
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


def biases_of(traits: DecoderTraits) -> str:
    """Attention biases of a model, as `Holds.biases` names them."""
    if traits.output_bias:
        return "qkvo" if traits.qkv_bias else "o"
    return "qkv" if traits.qkv_bias else "none"


def misfit(
    name: str, holds: Holds, dense: DenseModel, granularity: Granularity, dtype: torch.dtype
) -> str | None:
    """Why a model split that way does not fit an architecture (one sentence), or None."""
    traits = dense.family.traits(dense.config)
    plain_head_dim = dense.config.hidden_size // dense.config.num_attention_heads
    has_multipliers = traits.multipliers != Multipliers()
    wants_all = {"none": "without attention biases", "qkv": "with biases on query, key and value"}
    complaints = {
        f"has attention biases of kind {biases_of(traits)!r}, but {name} is built "
        f"{wants_all.get(holds.biases[0])}": biases_of(traits) not in holds.biases,
        f"has query and key norms of kind {traits.qk_norm!r}, but {name} has those of kind "
        f"{' or '.join(map(repr, holds.qk_norm))}": traits.qk_norm not in holds.qk_norm,
        f"has its norms {_place(traits.norms_after)} attention and FFN, but {name} has them "
        f"{_place(holds.norms_after)}": traits.norms_after != holds.norms_after,
        f"multiplies embeddings, residuals or logits by constants, which {name} does not": (
            has_multipliers and not holds.multipliers
        ),
        f"has heads of {traits.head_dim}, but {name} takes only hidden_size / heads = "
        f"{plain_head_dim}": traits.head_dim != plain_head_dim and not holds.any_head_dim,
        f"is split with a shared expert, which {name} has not": (
            granularity.shared_size > 0 and not holds.shared_expert
        ),
        f"keeps {granularity.first_dense_layers} leading layers dense, which {name} cannot": (
            granularity.first_dense_layers > 0 and not holds.dense_layers
        ),
    }
    for complaint, applies in complaints.items():
        if applies:
            return f"{dense.source} {complaint}."
    return rope_refusal(dense) or _size_misfit(name, dense, granularity, dtype)


def _place(after: bool) -> str:
    return "after" if after else "before"


def _size_misfit(
    name: str, dense: DenseModel, granularity: Granularity, dtype: torch.dtype
) -> str | None:
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
