"""The one idea of a format: what it holds, how it weights experts, its header, tensors and check.

Transformers checkpoints and GGUF files are members alike; all are listed in `export.FORMATS`.
What they write are the tensors of a `Conversion`, each described before it is made.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad

from dotmoe.checkpoint import DTYPES, EMBEDDING, HEAD, NORM, Tensors
from dotmoe.errors import UserError
from dotmoe.granularity import GROUPED_MATMUL_BYTES, Granularity
from dotmoe.layout import ExpertLayout
from dotmoe.models.family import DenseModel, Multipliers
from dotmoe.options import above, at_least
from dotmoe.progress import Update, no_update

BLOCKS = {name: (1, dtype.itemsize) for name, dtype in DTYPES.items()}
BLOCKS |= {"Q8_0": (32, 34), "Q4_0": (32, 18)}
"""Number formats of files: weights that are stored together, and bytes for them."""
STORED = {dtype: name for name, dtype in DTYPES.items()}
"""Name of a dtype in a file."""
PROJECTIONS = ("gate", "up", "down")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One tensor to be written; its size is known before its content is made."""

    name: str
    shape: tuple[int, ...]
    stored: str
    """Number format in the file, a key of `BLOCKS`."""
    make: Callable[[], Tensor]
    """Gives the tensor on the CPU; whoever writes it rounds it to `stored`, once."""

    @property
    def num_bytes(self) -> int:
        """In the file."""
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
    """2, k or E: times the weight of a chosen expert it is 1 but for the logits times 2^-p. It is
    folded into the down projections, or is a value that the file states."""
    casts: bool = False
    """Transformers rounds the weights to the dtype of the model."""
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

    def stored(self, name: str) -> str:
        """Number format in which a dense tensor is written."""
        return STORED[self.tensors.describe(name)[1] if self.keeps_dtypes else self.dtype]

    @property
    def shared_experts(self) -> int:
        """Experts as wide as a routed one for the neurons that are always on, at least 1."""
        return max(1, -(-self.granularity.shared_size // self.granularity.expert_size))

    @staticmethod
    def constant(name: str, shape: tuple[int, ...], dtype: torch.dtype, value: float) -> TensorSpec:
        """One value throughout."""
        made = torch.full(shape, value)
        return TensorSpec(name=name, shape=shape, stored=STORED[dtype], make=lambda: made)

    def carried(self, name: str) -> TensorSpec:
        """A dense tensor that keeps its name and content."""
        shape, _ = self.tensors.describe(name)
        make, stored = partial(self.tensors.read, name), self.stored(name)
        return TensorSpec(name=name, shape=shape, stored=stored, make=make)

    def router(self, layer: int, name: str, part: ExpertLayout | None = None) -> TensorSpec:
        """Router rows times 2^-p, [E, D]; exact, since the layout's rows are so in the dtype."""
        scale = 2.0 ** -self.exponents.get(layer, 0)
        rows_ED = (part or self.layout).router_LED[layer].cpu().double() * scale
        stored, shape = STORED[self.dtype], tuple(rows_ED.shape)
        return TensorSpec(name=name, shape=shape, stored=stored, make=lambda: rows_ED)

    def neurons(
        self, layer: int, part: str, neurons_S: Tensor, name: str, times: float = 1.0, size: int = 0
    ) -> TensorSpec:
        """The rows (of down: columns) of one projection that belong to some neurons.

        They are multiplied by `times`, which rounds once more unless it is a power of two, and
        filled up with zeros to `size` neurons.
        """
        source = self.dense.family.ffn_tensor(layer, part)
        axis = 1 if part == "down" else 0
        missing = max(0, size - len(neurons_S))
        shape = list(self.tensors.describe(source)[0])
        shape[axis] = len(neurons_S) + missing

        def make() -> Tensor:
            found = self.tensors.read(source).index_select(axis, neurons_S.cpu())
            if times != 1.0:
                found = found.double() * times
            return pad(found, (0, missing) if axis else (0, 0, 0, missing)) if missing else found

        stored = self.stored(source)
        return TensorSpec(name=name, shape=tuple(shape), stored=stored, make=make)

    def shared(self, layer: int, name: str, size: int, down: float = 1.0) -> Iterator[TensorSpec]:
        """The shared expert of a layer, filled up to `size`, its down projection times `down`.

        `{}` in `name` stands for the projection.
        """
        shared_S = self.layout.shared_neurons(layer)
        for part in PROJECTIONS:
            times = down if part == "down" else 1.0
            yield self.neurons(layer, part, shared_S, name.format(part), times, size)

    def stacked(self, layer: int, part: str, neurons_ES: Tensor, times: float = 1.0) -> TensorSpec:
        """One projection of all experts as one tensor: [E, S, D], or [E, D, S] for down."""
        flat = self.neurons(layer, part, neurons_ES.flatten(), "", times)
        (num_experts, size), width = neurons_ES.shape, self.dense.widths.model

        def make() -> Tensor:
            if part == "down":
                return flat.make().view(width, num_experts, size).transpose(0, 1)
            return flat.make().view(num_experts, size, width)

        shape = (num_experts, width, size) if part == "down" else (num_experts, size, width)
        return replace(flat, shape=shape, make=make)

    def linears(
        self, layer: int, neurons_ES: Tensor, names: tuple[str, str], times: float = 1.0
    ) -> Iterator[TensorSpec]:
        """Gate and up projections of all experts, [E, 2 S, D], and the down ones, [E, D, S]."""
        gate, up = (self.stacked(layer, part, neurons_ES) for part in ("gate", "up"))
        num_experts, size, width = gate.shape

        def make() -> Tensor:
            return torch.cat([gate.make(), up.make()], dim=1)

        yield replace(gate, name=names[0], shape=(num_experts, 2 * size, width), make=make)
        yield replace(self.stacked(layer, "down", neurons_ES, times), name=names[1])

    def require_no_others(self, format_name: str) -> None:
        """Refuse a checkpoint with weights that would be left behind."""
        known = {NORM}
        for layer in range(self.dense.widths.layers):
            known.update(layer_names(self.dense, layer))
        reached = {self.tensors.stored_name(name) for name in known} | {EMBEDDING, HEAD}
        # Old checkpoints store the rotary frequencies, a constant.
        others = sorted(x for x in self.tensors.names - reached if not x.endswith(".inv_freq"))
        if others:
            raise UserError(
                f"{others[0]} is stored in {self.tensors.folder}, but {format_name} has no place "
                f"for it ({len(others)} such tensors). Choose a plain checkpoint of its family."
            )


def layer_names(dense: DenseModel, layer: int, *, ffn: bool = True) -> list[str]:
    """Tensors of one layer in LLaMA's form, with or without those of its FFN, which come last."""
    traits = dense.family.traits(dense.config)
    after = ("post_attention", "post_feedforward")
    norms = after if traits.norms_after else ("input", "post_attention")
    names = [f"{name}_layernorm.weight" for name in norms]
    names += [f"self_attn.{part}_proj.weight" for part in "qkvo"]
    biased = "qkv" * traits.qkv_bias + "o" * traits.output_bias
    names += [f"self_attn.{part}_proj.bias" for part in biased]
    if traits.qk_norm != "none":
        names += [f"self_attn.{part}_norm.weight" for part in "qk"]
    of_ffn = [dense.family.ffn_tensor(layer, projection) for projection in PROJECTIONS * ffn]
    return [f"model.layers.{layer}.{name}" for name in names] + of_ffn


@dataclass(frozen=True, kw_only=True, slots=True)
class Holds:
    """Features of a dense decoder that a format has a place for; see `DecoderTraits`."""

    biases: tuple[str, ...] = ("none",)
    """Attention biases: none, on query, key and value (qkv), on the output (o), or on all."""
    qk_norm: tuple[str, ...] = ("none",)
    norms: str = "before"
    """Whether norms stand before or after attention and FFN."""
    multipliers: tuple[str, ...] = ("none",)
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

    def refusal(self, dense: DenseModel, split: Granularity, dtype: torch.dtype) -> str | None:
        """Why such a split cannot be exported exactly (one sentence with the remedy), or None."""
        return self.no_place(dense, split) or self.no_kernel(dense, split, dtype)

    def no_place(self, dense: DenseModel, split: Granularity) -> str | None:
        """Why it has no place for a model split that way (one sentence), or None."""
        holds, config = self.holds, dense.config
        traits = dense.family.traits(config)
        biases = "qkv" * traits.qkv_bias + "o" * traits.output_bias or "none"
        multipliers = "none" if traits.multipliers == Multipliers() else "constant"
        rope = config.rope_parameters.get("rope_type", "default")
        usual = config.hidden_size // config.num_attention_heads
        shared, leading = split.shared_size, split.first_dense_layers
        norms = "after" if traits.norms_after else "before"
        features: dict[str, tuple[Any, tuple[Any, ...]]] = {
            "attention biases": (biases, holds.biases),
            "query and key norms": (traits.qk_norm, holds.qk_norm),
            "norms beside attention and FFN": (norms, (holds.norms,)),
            "multipliers": (multipliers, holds.multipliers),
            "head_dim": (traits.head_dim, (traits.head_dim if holds.any_head_dim else usual,)),
            "rope_type": (rope, holds.rope),
            "neurons in a shared expert": (shared, (shared if holds.shared_expert else 0,)),
            "targets": (split.targets, ("ffn",)),
            "leading dense layers": (leading, (leading if holds.dense_layers else 0,)),
        }
        for what, (found, taken) in features.items():
            if found not in taken:
                kinds = " or ".join(map(repr, taken))
                return f"{dense.source} has {what} {found!r}, but {self.name} takes only {kinds}."
        if rope == "dynamic" and self.context(dense) < dense.widths.context:
            return (
                f"{dense.source} has rope_type 'dynamic' together with a sliding window; both "
                f"depend on max_position_embeddings, which {self.name} must lower."
            )
        return None

    def no_kernel(self, dense: DenseModel, split: Granularity, dtype: torch.dtype) -> str | None:
        """Why stock Transformers could not run experts of that size, or None."""
        if split.num_experts < 2:
            return f"The layout has one expert a layer, but {self.name} needs at least 2."
        multiple = GROUPED_MATMUL_BYTES // dtype.itemsize
        sizes = ("expert_size", split.expert_size), ("The model width", dense.widths.model)
        for what, size in sizes:
            if size % multiple:
                return (
                    f"{what} is {size}, but in {str(dtype).removeprefix('torch.')} the grouped "
                    f"matrix product that runs the experts takes multiples of {multiple} only. "
                    "Choose such an expert_size, or another model."
                )
        return None

    @abstractmethod
    def gating(self, split: Granularity) -> Gating:
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
        note = (
            f"The dense model attends through a sliding window of {context} tokens, which "
            f"{self.name} has not: its context is lowered from {whole} to the window, up to which "
            "the two are the same."
        )
        return [] if context == whole else [note]

    def details(self, conversion: Conversion) -> dict[str, Any]:
        """What goes on record of this container alone."""
        return {}

    @abstractmethod
    def header(self, conversion: Conversion) -> dict[str, Any]:
        """Content of config.json, or the metadata keys of a GGUF."""

    @abstractmethod
    def tensors(self, conversion: Conversion) -> Iterator[TensorSpec]:
        """The tensors in the order in which they are best read and written."""

    @abstractmethod
    def write(self, conversion: Conversion, folder: Path) -> list[str]:
        """Write header, tensors and tokenizer into a folder; returns the names of weight files."""

    @abstractmethod
    def check(
        self, conversion: Conversion, folder: Path, tokens_BT: Int[Tensor, "B T"]
    ) -> tuple[dict[str, Any], list[str]]:
        """Compare the written folder with the masked dense model; see `verify` and `check_gguf`.

        Returns:
            What was measured, for `ExportRecord.verification`; a sentence for each limit exceeded.
        """
