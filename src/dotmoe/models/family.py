"""Dense architectures that can be converted (`FAMILIES`), and where each has its tensors."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.activations import ACT2FN

from dotmoe.common.errors import UserError, nearest
from dotmoe.models.hf_config import activation_name, declared, head_dim, rope_of
from dotmoe.models.meta_model import meta_model
from dotmoe.models.targets import TARGETS, Target
from dotmoe.models.traits import ACTIVATIONS, SILU, Activation, DecoderTraits, Multipliers

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
MOE = "it is a Mixture-of-Experts already, and only a dense model can be split"
_USUAL = re.compile(
    r"self_attn\.([qkvo]_proj(\.bias)?|[qk]_norm)|mlp\.(gate|up|down|gate_up)_proj"
    r"|(input|post_attention|pre_feedforward|post_feedforward)_layernorm"
)
"""Names of the tensors of a layer in most families."""


class TensorPart(NamedTuple):
    """Where a tensor lies in a checkpoint: a stored tensor, or some of its rows."""

    stored: str
    rows: tuple[int, int] | None = None
    """First row and the row after the last; None: all."""


class Rows(NamedTuple):
    """Some rows of a fused projection, callable like a separate projection; nothing is copied."""

    fused: nn.Linear
    rows: slice

    @property
    def weight(self) -> Tensor:
        """A view of the rows."""
        return self.fused.weight[self.rows]

    def __call__(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., rows]."""
        return F.linear(x, self.weight)


class GatedFFN(NamedTuple):
    """One FFN, down(activation(gate(x)) * up(x)) (eq:ffn_intermediate, eq:ffn_output)."""

    gate: nn.Linear | Rows
    up: nn.Linear | Rows
    down: nn.Linear
    activation: Activation = SILU

    def hidden(self, x: Tensor) -> Tensor:
        """H of eq:ffn_intermediate: map [..., D] to [..., N]."""
        return self.activation.apply(self.gate(x)) * self.up(x)


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A decoder in LLaMA's form; its traits are those of the stock model's modules and config."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    """Its own names of modules, by their names in LLaMA's form."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Stored projections that hold the rows of several, which stay fused in memory."""
    has_own_decoder: bool = False
    """Whether its decoder is none that its traits describe: only format dotmoe, which keeps the
    stock decoder, computes the same."""
    ffn_norm_after: str = "post_feedforward_layernorm"
    """Name of the norm after the FFN, if a layer has one."""
    norm_offset: float = 0.0
    """What norms add to their weights."""

    def unsupported(self, config: Any) -> str | None:
        """Why this config cannot be converted exactly (with the remedy), or None."""
        if experts := _experts_in(config):
            return f"{experts}: {MOE}. Choose a dense one."
        name = activation_name(config)
        if name not in ACTIVATIONS:
            return f"hidden_act is {name!r}, not SiLU or tanh GELU. Choose a SwiGLU or GeGLU model."
        if getattr(config, "mlp_bias", False):
            return "mlp_bias is true, but no stock MoE has it. Choose a model without it."
        return None

    def bias_in_ffn(self, model: nn.Module) -> str | None:
        """Name of a bias in the FFN of a stock model's layer, whatever its config calls it."""
        for layer in self.layers(model):
            for name, _ in self.block(layer, TARGETS["ffn"]).named_parameters():
                if name.endswith("bias"):
                    return name
        return None

    def traits(self, model: nn.Module) -> DecoderTraits:
        """Features of a stock model's decoder outside its FFNs; weights are not read."""
        config: Any = model.config
        layers = self.layers(model)
        width = head_dim(config)
        attending = (layer for layer in layers if getattr(layer, "self_attn", None))
        layer = next(attending, layers[0])  # of Qwen3.5 most have linear attention
        shapes = {name: weight.shape for name, weight in layer.named_parameters()}
        # Up to the window, full and sliding attention compute the same.
        kinds = declared(config, "layer_types") or ("sliding_attention",)
        window = declared(config, "sliding_window")
        attention = declared(config, "attention_multiplier")
        rotary = getattr(model.get_submodule("model"), "rotary_emb", None)
        frequencies = getattr(rotary, "inv_freq", None)
        # Granite 4 may have no positions and layers without attention.
        is_usual = rotary is not None and {"full_attention", "sliding_attention"}.issuperset(kinds)
        rope = rope_of(config)
        scaled_from = None
        if rope.get("llama_4_scaling_beta"):
            scaled_from = rope["original_max_position_embeddings"]
        return DecoderTraits(
            head_dim=width,
            qkv_bias="self_attn.q_proj.bias" in shapes,
            output_bias="self_attn.o_proj.bias" in shapes,
            qk_norm=_qk_norm_of(shapes.get("self_attn.q_norm.weight"), width),
            has_own_decoder=self.has_own_decoder or not is_usual,
            norms_after=hasattr(layer, self.ffn_norm_after),
            sliding_window=window if "sliding_attention" in kinds else None,
            all_slide="full_attention" not in kinds,
            scaled_from=scaled_from,
            activation=ACTIVATIONS[activation_name(config)].name,
            rotated=1.0 if frequencies is None else 2 * len(frequencies) / width,
            multipliers=Multipliers(
                embedding=float(declared(config, "embedding_multiplier", 1.0)),
                residual=float(declared(config, "residual_multiplier", 1.0)),
                attention=None if attention == width**-0.5 else attention,
                logits_divisor=float(declared(config, "logits_scaling", 1.0)),
            ),
        )

    def layers(self, model: nn.Module) -> nn.ModuleList:
        """The decoder layers, in order."""
        return cast(nn.ModuleList, model.get_submodule("model.layers"))

    def ffn(self, layer: nn.Module) -> GatedFFN:
        """The three projections of one layer's FFN, and the activation function."""
        mlp: Any = self.block(layer, TARGETS["ffn"])
        down = self.output(layer, TARGETS["ffn"])
        activation = _activation_of(mlp)
        for name, parts in self.fused.items():
            if "gate_proj" not in parts:
                continue
            fused = getattr(mlp, name)
            width = down.weight.shape[1]
            gate_rows = slice(0, width)
            up_rows = slice(width, 2 * width)
            return GatedFFN(Rows(fused, gate_rows), Rows(fused, up_rows), down, activation)
        gate = getattr(mlp, self.own_name("gate_proj"))
        up = getattr(mlp, self.own_name("up_proj"))
        return GatedFFN(gate, up, down, activation)

    def own_name(self, name: str) -> str:
        """The family's name of a tensor or module that has `name` in LLaMA's form."""
        return ".".join(self.renamed.get(part, part) for part in name.split("."))

    def block(self, layer: nn.Module, target: Target) -> nn.Module:
        """The target's module in a decoder layer."""
        return layer.get_submodule(self.own_name(target.module))

    def output(self, layer: nn.Module, target: Target) -> nn.Linear:
        """The target's output projection in a decoder layer."""
        name = self.own_name(f"{target.module}.{target.output_name}")
        return cast(nn.Linear, layer.get_submodule(name))

    def norm_after(self, layer: nn.Module, target: Target) -> nn.Module:
        """The norm (or identity) between a part and the stream, before a residual multiplier."""
        is_ffn = target.name == "ffn"
        name = self.ffn_norm_after if is_ffn else "post_attention_layernorm"
        return getattr(layer, name) if hasattr(layer, self.ffn_norm_after) else nn.Identity()

    def gain(self, norm: nn.Module) -> Tensor:
        """What an RMSNorm multiplies by, [D], float32."""
        return cast(Tensor, norm.weight).float() + self.norm_offset

    def ffn_tensor(self, layer: int, projection: str) -> str:
        """Name of the `gate`, `up` or `down` weight of a layer, in LLaMA's form."""
        return f"model.layers.{layer}.mlp.{projection}_proj.weight"

    def names(self, layer: nn.Module) -> list[str]:
        """Names of a decoder layer's tensors in LLaMA's form, within the layer."""
        plain = {own: name for name, own in self.renamed.items()}
        found = list[str]()
        for own, _ in layer.named_parameters():
            name = ".".join(plain.get(part, part) for part in own.split("."))
            block, _, rest = name.partition(".")
            projection, _, kind = rest.partition(".")
            parts = self.fused.get(projection)
            found += [f"{block}.{part}.{kind}" for part in parts] if parts else [name]
        return found

    def stored(self, config: Any, name: str) -> TensorPart:
        """Where this family's checkpoints store the tensor that has `name` in LLaMA's form."""
        queries = config.num_attention_heads * head_dim(config)
        keys = config.num_key_value_heads * head_dim(config)
        neurons = config.intermediate_size
        rows = {
            "q_proj": queries,
            "k_proj": keys,
            "v_proj": keys,
            "gate_proj": neurons,
            "up_proj": neurons,
        }
        for fused, parts in self.fused.items():
            end = 0
            for part in parts:
                start = end
                end = start + rows[part]
                if f".{part}." in name:
                    own = self.own_name(name.replace(part, fused))
                    return TensorPart(own, (start, end))
        return TensorPart(self.own_name(name))


def _qk_norm_of(norm_shape: torch.Size | None, head_width: int) -> Literal["none", "head", "full"]:
    """What the norms of queries and keys see: one head, all heads, or there are none."""
    if not norm_shape:
        return "none"
    return "head" if norm_shape == (head_width,) else "full"


def _activation_of(mlp: nn.Module) -> Activation:
    """The activation function among an FFN's modules; LFM2, which has none, calls SiLU."""
    kinds = {type(ACT2FN[name]): activation for name, activation in ACTIVATIONS.items()}
    for part in mlp.children():
        if type(part) in kinds:
            return kinds[type(part)]
    return SILU


_PLAIN = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "granite",
    "olmo2",
    "internlm3",
    "iquestcoder",
    "seed_oss",
    "cwm",
    "ministral",
    "ministral3",
)
"""Model types whose decoder is one that traits describe, with LLaMA's names and nothing fused."""
_WITH_OWN_DECODER = ("smollm3", "olmo3", "exaone4", "cohere2", "hunyuan_v1_dense", "ernie4_5")
"""The same with a decoder that traits do not describe."""
_WITH_NORM_OFFSET = ("gemma", "gemma2", "gemma3_text", "qwen3_5_text")
"""The same with such a decoder, and norms that add 1 to their weights."""
_GATE_UP = ("gate_proj", "up_proj")
FAMILIES = {
    **dict.fromkeys(_PLAIN, Family()),
    "phi3": Family(fused={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": _GATE_UP}),
    **dict.fromkeys(_WITH_OWN_DECODER, Family(has_own_decoder=True)),
    **dict.fromkeys(_WITH_NORM_OFFSET, Family(has_own_decoder=True, norm_offset=1.0)),
    "glm4": Family(
        has_own_decoder=True, fused={"gate_up_proj": _GATE_UP}, ffn_norm_after="post_mlp_layernorm"
    ),
    "granitemoehybrid": Family(  # Granite 4; without experts, its shared one is the FFN
        renamed={"mlp": "shared_mlp", "down_proj": "output_linear"},
        fused={"input_linear": _GATE_UP},
    ),
    "lfm2": Family(
        has_own_decoder=True,
        renamed={
            "mlp": "feed_forward",
            "gate_proj": "w1",
            "up_proj": "w3",
            "down_proj": "w2",
            "norm": "embedding_norm",
        },
    ),
}


def family_of(config: Any) -> Family:
    """The family of a Hugging Face config; raises `UserError` if it cannot be converted."""
    if config.model_type not in FAMILIES:
        raise no_family(config)
    family = FAMILIES[config.model_type]
    if refused := family.unsupported(config):
        raise UserError(f"In this {config.model_type} config {refused}")
    return family


def no_family(config: Any) -> UserError:
    """The error for a config whose type is of no family, with the reason."""
    model_type = config.model_type
    # A type that Transformers knows is no typing error: olmo3 is not meant to be olmo2.
    meant = "" if model_type in CONFIG_MAPPING else nearest(model_type, FAMILIES)
    return UserError(
        f"model_type is {model_type!r}, which dotmoe cannot convert: {_unknown_in(config)}. "
        f"Families: {', '.join(FAMILIES)}.{meant}"
    )


def _unknown_in(config: Any) -> str:
    """What keeps a model whose type is of no family from being converted: one clause."""
    kind = config.model_type
    text = getattr(config, "text_config", None)
    if isinstance(text, Mapping):
        inner = SimpleNamespace(**{"model_type": "unknown"} | dict(text))
        return f"it wraps a language model of type {inner.model_type!r}, and {_unknown_in(inner)}"
    if "moe" in kind or _experts_in(config):
        return MOE
    try:
        model = meta_model(CONFIG_MAPPING[kind].from_dict(vars(config)))
        layer = next(part for part in model.modules() if isinstance(part, nn.ModuleList))[0]
    except Exception:  # noqa: BLE001  (of any type: it depends on the invalid value)
        return f"Transformers {transformers.__version__} makes no causal language model of it"
    parts = [name.removesuffix(".weight") for name, _ in layer.named_parameters()]
    if not any(name.endswith(("gate_proj", "gate_up_proj", ".w1")) for name in parts):
        return "its layers have no gated FFN"
    unknown = [name for name in parts if not _USUAL.fullmatch(name)]
    if unknown:
        return f"its layers have {unknown[0]} ({len(unknown)} such parts), unknown to dotmoe"
    return "its layers have the usual parts, but what they compute was not checked"


def _experts_in(config: Any) -> str | None:
    """What a config says of experts, if that is more than one."""
    counts = {key: getattr(config, key, None) for key in _EXPERT_COUNTS}
    found = (f"{key} is {n}" for key, n in counts.items() if isinstance(n, int) and n > 1)
    return next(found, None)
