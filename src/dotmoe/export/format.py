"""The one idea of a format: what it holds, how it weights experts, its header, tensors and check.

Transformers checkpoints and GGUF files are members alike. What they write are the tensors of a
`Conversion`, each described before it is made.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad

from dotmoe.checkpoint import DTYPES, EMBEDDING, HEAD, NORM, Tensors
from dotmoe.errors import UserError
from dotmoe.granularity import Granularity
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

    @classmethod
    def of(cls, name: str, tensor: Tensor, dtype: torch.dtype) -> "TensorSpec":
        """One that is made already, written in a dtype."""
        shape = tuple(tensor.shape)
        return cls(name=name, shape=shape, stored=STORED[dtype], make=lambda: tensor)

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
    """How the runtimes of a format weight the chosen experts by their logits."""

    score: Literal["none", "softmax", "sigmoid", "softmax_of_chosen"] = "softmax"
    """Softmax or sigmoid over all experts before the k are chosen, or softmax over the chosen;
    none: every weight is 1, and no router is scaled."""
    renormalised: bool = True
    """Weights are divided by their sum over the chosen."""
    casts: bool = True
    """Transformers rounds the weights to the dtype of the model."""
    only_in: str | None = None
    """The one runtime that runs such files; None: all may."""
    exponent: int | None = None
    """p of every layer's router; None: chosen by layer from the router's logits."""

    def constant(self, active_experts: int, num_experts: int) -> float:
        """2, k or E: times the weight of a chosen expert it is 1 but for the logits times 2^-p."""
        if self.score == "sigmoid":
            return 2.0
        return float(active_experts if self.renormalised else num_experts)


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
    origin: DenseModel
    """The dense model that the work began with."""
    on_progress: Update = no_update
    """Told tensors written, then layers verified."""

    @property
    def keeps_dtypes(self) -> bool:
        """Every dense tensor keeps the dtype in which it is stored; else all take `dtype`."""
        return self.config.export_dtype == "source"

    @property
    def dtype_name(self) -> str:
        """Of `dtype`, such as bfloat16."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def shared_experts(self) -> int:
        """Experts as wide as a routed one for the neurons that are always on, at least 1."""
        split = self.layout.granularity
        return max(1, -(-split.shared_size // split.expert_size))

    def spec(
        self, source: str, name: str = "", change: Callable[[Tensor], Tensor] = lambda whole: whole
    ) -> TensorSpec:
        """A dense tensor as it is, or under another name and changed."""
        shape, dtype = self.tensors.describe(source)
        changed = change(torch.empty(shape, dtype=dtype, device="meta"))
        return TensorSpec(
            name=name or source,
            shape=tuple(changed.shape),
            stored=STORED[dtype if self.keeps_dtypes else self.dtype],
            make=lambda: change(self.tensors.read(source)),
        )

    def router(self, layer: int, name: str, part: ExpertLayout | None = None) -> TensorSpec:
        """Router rows times 2^-p, [E, D]; exact, since the layout's rows are so in the dtype."""
        scale = 2.0 ** -self.exponents.get(layer, 0)
        rows_ED = (part or self.layout).router_LED[layer].cpu().double() * scale
        return TensorSpec.of(name, rows_ED, self.dtype)

    def slices(
        self, source: str, axis: int, index: Tensor, name: str, times: float = 1.0, size: int = 0
    ) -> TensorSpec:
        """Rows (axis 0) or columns (axis 1) of a dense tensor.

        An index [S] gives one matrix, one of experts, [E, S], a tensor of theirs, [E, ...]. Weights
        are multiplied by `times`, which rounds once more unless it is a power of two, and filled up
        with zeros to `size` rows or columns.
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

    def neurons(
        self, layer: int, part: str, neurons: Tensor, name: str, times: float = 1.0, size: int = 0
    ) -> TensorSpec:
        """The `slices` of one projection that belong to some neurons."""
        source = self.dense.family.ffn_tensor(layer, part)
        return self.slices(source, int(part == "down"), neurons, name, times, size)

    def projections(
        self, layer: int, neurons: Tensor, name: str, down: float = 1.0, size: int = 0
    ) -> Iterator[TensorSpec]:
        """All three of some neurons, the last times `down`; `{}` in `name` stands for which."""
        for part in PROJECTIONS:
            times = down if part == "down" else 1.0
            yield self.neurons(layer, part, neurons, name.format(part), times, size)

    def linears(
        self, layer: int, neurons: Tensor, names: tuple[str, str], times: float = 1.0
    ) -> Iterator[TensorSpec]:
        """Gate and up projections as one, [2 S, D] or of experts [E, 2 S, D], and the down ones."""
        gate, up = (self.neurons(layer, part, neurons, names[0]) for part in ("gate", "up"))
        *outer, size, width = gate.shape

        def make() -> Tensor:
            return torch.cat([gate.make(), up.make()], dim=-2)

        yield replace(gate, shape=(*outer, 2 * size, width), make=make)
        yield self.neurons(layer, "down", neurons, names[1], times)

    def require_no_others(self, format_name: str) -> None:
        """Refuse a checkpoint with weights that would be left behind."""
        layers = range(self.dense.widths.layers)
        names = {NORM}.union(*(layer_names(self.dense, layer) for layer in layers))
        reached = {self.tensors.stored_name(name) for name in names} | {EMBEDDING, HEAD}
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
    projections = [dense.family.ffn_tensor(layer, part) for part in PROJECTIONS * ffn]
    return [f"model.layers.{layer}.{name}" for name in names] + projections


class Format(ABC):
    """A format to export to."""

    name: str
    servers: tuple[str, ...]
    """Software that runs it without further code."""
    holds: tuple[str, ...] = ()
    """Of the features in `refusal`, those that it has a place for."""
    demands: tuple[str, ...] = ()
    """Those that it cannot do without."""
    rope_types: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn")
    """Rotary embeddings that it computes as the dense model does."""
    holds_window: bool = False
    """Sliding attention windows; without, the context is cut to the window."""
    active_experts_key: str = "num_experts_per_tok"
    """Key of the header that holds k."""
    active_experts_editable: bool = False
    """Whether k may be changed after export."""
    gating: Gating = Gating()
    writes_tied_head: bool = True
    splits: bool = True
    """Whether FFNs become experts; if not, it is the dense model in another container."""

    def refusal(self, dense: DenseModel, split: Granularity, dtype: torch.dtype) -> str | None:
        """Why such a split cannot be exported exactly, in one sentence, or None."""
        traits, config = dense.family.traits(dense.config), dense.config
        biases = "qkv" * traits.qkv_bias + "o" * traits.output_bias
        rope = config.rope_parameters["rope_type"]
        usual_width = config.hidden_size // config.num_attention_heads
        features = {
            f"{biases} biases": biases,
            f"query norms: {traits.qk_norm}": traits.qk_norm != "none",
            "norms after attention": traits.norms_after,
            "multipliers": traits.multipliers != Multipliers(),
            "its own head_dim": traits.head_dim != usual_width,
            f"rope_type {rope}": rope not in self.rope_types,
            "experts made of heads": split.targets != "ffn",
            "a shared expert": split.shared_size,
            "dense layers": split.first_dense_layers,
        }
        present = {name for name, is_present in features.items() if is_present}
        for name in sorted(present.difference(self.holds, self.demands)):
            return f"{dense.source} has {name}, for which {self.name} has no place."
        for name in sorted(set(self.demands) - present):
            return f"{dense.source} has no {name}, which {self.name} demands."
        if rope == "dynamic" and self.context(dense) < dense.widths.context:
            return (
                f"{dense.source} has rope_type 'dynamic' together with a sliding window; both "
                f"depend on max_position_embeddings, which {self.name} must lower."
            )
        return None

    @abstractmethod
    def exactness(self, conversion: Conversion) -> str:
        """What is exact and what is not, in a clause."""

    def context(self, dense: DenseModel) -> int:
        """Longest context in which the export computes what the dense model does, in tokens."""
        context, window = dense.widths.context, dense.family.traits(dense.config).sliding_window
        return context if self.holds_window or window is None else min(window, context)

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

    def tensors(self, conversion: Conversion) -> Iterator[TensorSpec]:
        """The tensors in the order in which they are best read and written."""
        conversion.require_no_others(self.name)
        is_left_out = conversion.dense.config.tie_word_embeddings and not self.writes_tied_head
        for name in [EMBEDDING, NORM] + [HEAD] * (not is_left_out):
            yield self.carried(conversion, name)
        for layer in range(conversion.layout.num_layers):
            yield from self.layer_tensors(conversion, layer)

    def layer_tensors(self, conversion: Conversion, layer: int) -> Iterator[TensorSpec]:
        """The tensors of one decoder layer."""
        is_split = self.splits and layer in conversion.layout.moe_layers
        for name in layer_names(conversion.dense, layer, ffn=not is_split):
            yield self.carried(conversion, name)
        if is_split:
            yield from self.moe_tensors(conversion, layer)

    def carried(self, conversion: Conversion, name: str) -> TensorSpec:
        """A dense tensor that is written."""
        return conversion.spec(name)

    @abstractmethod
    def moe_tensors(self, conversion: Conversion, layer: int) -> Iterator[TensorSpec]:
        """Router and experts of a split layer."""

    @abstractmethod
    def write(self, conversion: Conversion, folder: Path) -> list[str]:
        """Write header, tensors and tokenizer into a folder; returns the names of weight files."""

    @abstractmethod
    def check(
        self, conversion: Conversion, folder: Path, tokens_BT: Int[Tensor, "B T"]
    ) -> tuple[dict[str, Any], list[str]]:
        """What was measured beside the masked dense model, and a sentence for each limit exceeded.

        See `verify` and `check_gguf`.
        """
