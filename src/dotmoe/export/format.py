"""Base class of export formats: supported features, gating, header, tensors and verification.

Transformers checkpoints and GGUF files are both subclasses. They write the tensors of a
`ConvertedModel`, each of which is described before it is computed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad

from dotmoe.common.numbers import ceil_div
from dotmoe.common.progress import Update, no_update
from dotmoe.export.config import GgufConfig
from dotmoe.method.granularity import Granularity, Splits, targets_of
from dotmoe.method.layout import ExpertLayout, Layouts
from dotmoe.models.checkpoint import DTYPES, EMBEDDING, HEAD, NORM, Tensors, dtype_name
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.hf_config import rope_of
from dotmoe.models.traits import SILU, Multipliers

BLOCKS = {name: (1, dtype.itemsize) for name, dtype in DTYPES.items()}
BLOCKS |= {"Q8_0": (32, 34), "Q4_0": (32, 18)}
"""Number formats of files: number of weights in a block, and bytes of a block."""
STORED = {dtype: name for name, dtype in DTYPES.items()}
"""Name of each dtype in a file."""
EXPORTED = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float32,
}
"""Dtype written for each stored one: float32 holds float16, whose range is too small for routers
times 2^-p, exactly; bfloat16 would round it."""
PROJECTIONS = ("gate", "up", "down")


class Feature(StrEnum):
    """What a format must be able to hold, or a model to have, beyond plain LLaMA; as users read it.

    Those of the decoder come first, then those of the split.
    """

    QKV_BIASES = "qkv biases"
    OUTPUT_BIASES = "o biases"
    ALL_BIASES = "qkvo biases"
    NORMS_OF_HEADS = "query norms: head"
    NORMS_OVER_HEADS = "query norms: full"
    NORMS_AFTER = "norms after attention"
    MULTIPLIERS = "multipliers"
    OWN_HEAD_DIM = "its own head_dim"
    PARTLY_ROTATED = "partly rotated heads"
    TANH_GELU = "tanh GELU"
    EXPERTS_OF_HEADS = "experts made of heads"
    SHARED_EXPERT = "a shared expert"
    DENSE_LAYERS = "dense layers"


BIASES = (Feature.QKV_BIASES, Feature.OUTPUT_BIASES, Feature.ALL_BIASES)
_BIASES_OF = {
    (True, False): Feature.QKV_BIASES,
    (False, True): Feature.OUTPUT_BIASES,
    (True, True): Feature.ALL_BIASES,
}
_NORMS_OF = {"head": Feature.NORMS_OF_HEADS, "full": Feature.NORMS_OVER_HEADS}


def features_of_decoder(dense: DenseModel) -> set[Feature]:
    """Features of a decoder outside its FFNs, besides its rotary embedding and its window."""
    traits, config = dense.traits, dense.config
    found = set[Feature]()
    biases = traits.qkv_bias, traits.output_bias
    if any(biases):
        found.add(_BIASES_OF[biases])
    if traits.qk_norm != "none":
        found.add(_NORMS_OF[traits.qk_norm])
    if traits.norms_after:
        found.add(Feature.NORMS_AFTER)
    if traits.multipliers != Multipliers():
        found.add(Feature.MULTIPLIERS)
    if traits.head_dim != config.hidden_size // config.num_attention_heads:
        found.add(Feature.OWN_HEAD_DIM)
    if traits.rotated != 1:
        found.add(Feature.PARTLY_ROTATED)
    if traits.activation != SILU.name:
        found.add(Feature(traits.activation))
    return found


def features_of_split(splits: Splits) -> set[Feature]:
    """Features of a split beyond experts of neurons in all layers."""
    found = set[Feature]()
    if targets_of(splits) != "ffn":
        found.add(Feature.EXPERTS_OF_HEADS)
    if splits[0].shared_size:
        found.add(Feature.SHARED_EXPERT)
    if splits[0].first_dense_layers:
        found.add(Feature.DENSE_LAYERS)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Description of a tensor to write; its size is known before its content is computed."""

    name: str
    shape: tuple[int, ...]
    stored: str
    """Number format in the file, a key of `BLOCKS`."""
    make: Callable[[], Tensor]
    """Returns the tensor on the CPU; the writer rounds it to `stored`, once."""

    @classmethod
    def of(cls, name: str, tensor: Tensor, dtype: torch.dtype) -> "TensorSpec":
        """Spec of an existing tensor, to be written in `dtype`."""
        shape = tuple(tensor.shape)
        return cls(name=name, shape=shape, stored=STORED[dtype], make=lambda: tensor)

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in the file, in bytes."""
        weights, size = BLOCKS[self.stored]
        return prod(self.shape) // weights * size


@dataclass(frozen=True, kw_only=True, slots=True)
class Gating:
    """How a format's runtimes compute the weights of the chosen experts from their logits."""

    score: Literal["none", "softmax", "sigmoid", "softmax_of_chosen"] = "softmax"
    """Function of the logits: softmax or sigmoid over all experts before k of them are chosen, or
    softmax over the chosen ones; none: every weight is 1, and no router is scaled. Weights by a
    softmax are divided by their sum over the chosen experts."""
    casts: bool = True
    """Whether Transformers rounds the weights to the dtype of the model."""
    only_in: str | None = None
    """The only runtime that runs such files; None: any runtime may."""

    def constant(self, active_experts: int) -> float:
        """Factor (2 or k) that makes a chosen expert's weight 1, up to about l 2^-p."""
        return 2.0 if self.score == "sigmoid" else float(active_experts)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertedModel:
    """A dense model with its experts, and how to write it: all that a format reads."""

    dense: DenseModel
    tensors: Tensors
    """The dense checkpoint's files, the only source of weights."""
    layouts: Layouts
    """Experts, routers and k; `dtype` represents the router entries exactly."""
    exponents: Mapping[int, int]
    """Exponent p of each split layer, whose router is written as 2^-p W_r."""
    dtype: torch.dtype
    """Dtype of routers and experts, and of tensors that the dense model lacks."""
    config: GgufConfig
    origin: DenseModel
    """The original dense model, before any repair or finetuning."""
    on_progress: Update = no_update
    """Called with the number of tensors written, then of layers verified."""

    @property
    def layout(self) -> ExpertLayout:
        """The first layout, which most formats hold alone."""
        return self.layouts[0]

    def layout_of(self, target: str) -> ExpertLayout | None:
        """The layout of FFNs or of attention; None if it is not split."""
        return next((each for each in self.layouts if each.target == target), None)

    @property
    def keeps_dtypes(self) -> bool:
        """Whether every dense tensor keeps its stored dtype; otherwise all become `dtype`."""
        return self.config.export_dtype == "source"

    @property
    def dtype_name(self) -> str:
        """Name of `dtype`, such as bfloat16."""
        return dtype_name(self.dtype)

    def spec(
        self, source: str, name: str = "", change: Callable[[Tensor], Tensor] = lambda whole: whole
    ) -> TensorSpec:
        """Spec of a dense tensor; `name` renames it, `change` transforms it."""
        shape, dtype = self.tensors.describe(source)
        changed = change(torch.empty(shape, dtype=dtype, device="meta"))
        return TensorSpec(
            name=name or source,
            shape=tuple(changed.shape),
            stored=STORED[dtype if self.keeps_dtypes else self.dtype],
            make=lambda: change(self.tensors.read(source)),
        )

    def router(self, layer: int, name: str, layout: ExpertLayout | None = None) -> TensorSpec:
        """Spec of the router rows times 2^-p, [E, D]; exact, as the rows are exact in `dtype`."""
        scale = 2.0 ** -self.exponents.get(layer, 0)
        rows_ED = (layout or self.layout).router_LED[layer].cpu().double() * scale
        return TensorSpec.of(name, rows_ED, self.dtype)

    def slices(
        self, source: str, axis: int, index: Tensor, name: str, times: float = 1.0, size: int = 0
    ) -> TensorSpec:
        """Spec of some rows (axis 0) or columns (axis 1) of a dense tensor.

        An index [S] gives one matrix, an index [E, S] a stack of the experts' matrices, [E, ...].
        Weights are multiplied by `times`, which rounds once more unless it is a power of two, and
        padded with zeros to `size` rows or columns.
        """
        missing = max(0, size - index.numel())

        def change(whole: Tensor) -> Tensor:
            part = whole.index_select(axis, index.flatten().cpu())
            if times != 1.0:
                part = part.double() * times
            if missing:
                part = pad(part, (0, missing) if axis else (0, 0, 0, missing))
            if index.dim() == 1:
                return part
            return torch.unflatten(part, axis, tuple(index.shape)).movedim(axis, 0)

        return self.spec(source, name, change)

    def projection(
        self,
        layer: int,
        projection: str,
        neurons: Tensor,
        name: str,
        times: float = 1.0,
        size: int = 0,
    ) -> TensorSpec:
        """Spec of the `slices` of one FFN projection that belong to some neurons."""
        source = self.dense.family.ffn_tensor(layer, projection)
        axis = 1 if projection == "down" else 0
        return self.slices(source, axis, neurons, name, times, size)

    def projections(
        self, layer: int, neurons: Tensor, name: str, down: float = 1.0, size: int = 0
    ) -> Iterator[TensorSpec]:
        """Specs of all projections of some neurons, W_down times `down`; `name` contains `{}`."""
        for projection in PROJECTIONS:
            times = down if projection == "down" else 1.0
            written = name.format(projection)
            yield self.projection(layer, projection, neurons, written, times, size)

    def fused_projections(
        self, layer: int, neurons: Tensor, names: tuple[str, str], times: float = 1.0
    ) -> Iterator[TensorSpec]:
        """Specs of fused gate and up projections, [2 S, D] or [E, 2 S, D], and of the down ones."""
        gate = self.projection(layer, "gate", neurons, names[0])
        up = self.projection(layer, "up", neurons, names[0])
        *outer, size, width = gate.shape

        def make() -> Tensor:
            return torch.cat([gate.make(), up.make()], dim=-2)

        yield replace(gate, shape=(*outer, 2 * size, width), make=make)
        yield self.projection(layer, "down", neurons, names[1], times)


def shared_experts(split: Granularity) -> int:
    """Number of experts of routed size that hold the always-on neurons, at least 1."""
    return max(1, ceil_div(split.shared_size, split.expert_size))


def layer_names(dense: DenseModel, layer: int, *, ffn: bool = True) -> list[str]:
    """Names of a layer's tensors in LLaMA's form; those of its FFN come last, if `ffn` is set."""
    parts = dense.family.names(dense.family.layers(dense.model)[layer])
    names = [f"model.layers.{layer}.{name}" for name in parts if not name.startswith("mlp.")]
    if ffn:
        names += [dense.family.ffn_tensor(layer, part) for part in PROJECTIONS]
    return names


class Format(ABC):
    """Base class of a format that a model can be exported to."""

    name: str
    servers: tuple[str, ...]
    """Software that runs the format; where that takes code of the export, the name says so."""
    supports: tuple[Feature, ...] = ()
    """Features that the format can represent."""
    requires: tuple[Feature, ...] = ()
    """Features that a model must have, because the format always has them."""
    rope_types: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn")
    """Types of rotary embeddings that the format computes as the dense model does."""
    supports_window: bool = False
    """Whether it supports a sliding window in all layers; if not, the context is cut to it."""
    active_experts_key: str = "num_experts_per_tok"
    """Key of the header that holds k."""
    active_experts_editable: bool = False
    """Whether k may be changed after export."""
    gating: Gating = Gating()
    writes_tied_head: bool = True
    twin_of: str | None = None
    """The only family that it holds, one with a decoder of its own; None: any of LLaMA's form."""
    has_experts: bool = True
    """Whether FFNs become experts; if not, the format stores the dense model as it is."""

    def unsupported(self, dense: DenseModel, splits: Splits, dtype: torch.dtype) -> str | None:
        """One sentence that states why these splits cannot be exported exactly, or None."""
        traits, config = dense.traits, dense.config
        is_twin = self.twin_of == config.model_type
        if (self.twin_of or traits.has_own_decoder) and not is_twin:
            kind = config.model_type
            return f"{dense.source} has the decoder of {kind}, which {self.name} cannot hold."
        present = features_of_split(splits)
        if not is_twin:  # a twin has the dense model's decoder, whatever that is
            present |= features_of_decoder(dense)
        rope = rope_of(config)["rope_type"]
        held = {*self.supports, *self.requires}
        not_held = {str(feature) for feature in present - held}
        if not is_twin and rope not in self.rope_types:
            not_held.add(f"rope_type {rope}")
        if not_held:
            return f"{dense.source} has {min(not_held)}, which {self.name} cannot hold."
        if missing := set(self.requires) - present:
            return f"{dense.source} has no {min(missing)}, which {self.name} requires."
        if rope in ("dynamic", "longrope") and self.context(dense) < dense.widths.context:
            return (
                f"{dense.source} has rope_type {rope!r} together with a sliding window; both "
                f"depend on max_position_embeddings, which {self.name} must lower."
            )
        return None

    def runs_in(self, dense: DenseModel) -> tuple[str, ...]:
        """Software that runs this model's export."""
        return self.servers

    @abstractmethod
    def exactness(self, converted: ConvertedModel) -> str:
        """A clause that states what is exact and what is not."""

    def context(self, dense: DenseModel) -> int:
        """Longest context in which the export computes what the dense model does, in tokens."""
        traits = dense.traits
        context = dense.widths.context
        if self.twin_of:
            return context
        window = None if self.supports_window and traits.all_slide else traits.sliding_window
        return min(context, window or context, traits.scaled_from or context)

    def notes(self, converted: ConvertedModel) -> list[str]:
        """What a user of the exported model must know, one sentence each."""
        left_out = (name.removeprefix("model.") for name in converted.tensors.left_out)
        others = sorted({name.partition(".")[0] for name in left_out})
        if not others:
            return []
        return [f"Text alone: {', '.join(others)} of the checkpoint are left out."]

    def details(self, converted: ConvertedModel) -> dict[str, Any]:
        """Extra fields of the record that only this format has."""
        return {}

    @abstractmethod
    def header(self, converted: ConvertedModel) -> dict[str, Any]:
        """Content of config.json, or the metadata keys of a GGUF."""

    def tensors(self, converted: ConvertedModel) -> Iterator[TensorSpec]:
        """Specs of all tensors, in the order that is best for reading and writing."""
        converted.tensors.require_tensors(converted.dense.model)
        outer = [EMBEDDING, NORM]
        if self.writes_tied_head or not converted.dense.config.tie_word_embeddings:
            outer.append(HEAD)
        for name in outer:
            yield self.dense_tensor(converted, name)
        for layer in range(converted.layout.num_layers):
            yield from self.layer_tensors(converted, layer)

    def layer_tensors(self, converted: ConvertedModel, layer: int) -> Iterator[TensorSpec]:
        """Specs of one decoder layer's tensors."""
        is_split = self.has_experts and layer in converted.layout.moe_layers
        for name in layer_names(converted.dense, layer, ffn=not is_split):
            yield self.dense_tensor(converted, name)
        if is_split:
            yield from self.moe_tensors(converted, layer)

    def dense_tensor(self, converted: ConvertedModel, name: str) -> TensorSpec:
        """Spec of a dense tensor that is not split."""
        return converted.spec(name)

    @abstractmethod
    def moe_tensors(self, converted: ConvertedModel, layer: int) -> Iterator[TensorSpec]:
        """Specs of a split layer's router and experts."""

    @abstractmethod
    def write(self, converted: ConvertedModel, folder: Path) -> list[str]:
        """Write header, tensors and tokenizer into a folder; return the names of weight files."""

    @abstractmethod
    def check(
        self, converted: ConvertedModel, folder: Path, tokens_BT: Int[Tensor, "B T"]
    ) -> tuple[dict[str, Any], list[str]]:
        """Compare the written files with the masked dense model; see `verify` and `check_gguf`.

        Returns the measurements, and a sentence for each exceeded limit.
        """
