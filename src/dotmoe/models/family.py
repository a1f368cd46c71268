"""Model families: what a dense architecture must tell to be converted. All are in `FAMILIES`."""

from dataclasses import dataclass, replace
from typing import Any, cast

from torch import nn
from transformers import CONFIG_MAPPING

from dotmoe.errors import UserError, nearest
from dotmoe.models.refusals import expert_count, reason
from dotmoe.models.traits import DecoderTraits, GatedFFN, Multipliers, Rows, TensorPart


class Family:
    """LLaMA 2 and 3: the plain pre-norm decoder; the others differ from it in a line or two."""

    def __init__(self, model_type: str) -> None:
        self.model_type = model_type
        """`model_type` of the Hugging Face config."""

    def refusal(self, config: Any) -> str | None:
        """Why this config cannot be converted exactly (one sentence with the remedy), or None."""
        place = f"in this {self.model_type} config"
        if config.hidden_act not in ("silu", "swish"):
            return (
                f"hidden_act is {config.hidden_act!r} {place}, but an FFN must be SiLU-gated "
                "(gate, up, down). Choose a SwiGLU model."
            )
        if getattr(config, "mlp_bias", False):
            return (
                f"mlp_bias is true {place}, but no stock MoE architecture has biases inside its "
                "experts. Choose a model without them."
            )
        return None

    def traits(self, config: Any) -> DecoderTraits:
        """What an exporter must know of everything but the FFNs."""
        has_bias = bool(getattr(config, "attention_bias", False))
        return DecoderTraits(head_dim=head_dim(config), qkv_bias=has_bias, output_bias=has_bias)

    def layers(self, model: nn.Module) -> nn.ModuleList:
        """The decoder layers, in order; each has its FFN as `mlp`."""
        return cast(nn.ModuleList, model.get_submodule("model.layers"))

    def ffn(self, layer: nn.Module) -> GatedFFN:
        """The three projections of one layer's FFN."""
        names = ("gate", "up", "down")
        return GatedFFN(
            *(cast(nn.Linear, layer.get_submodule(f"mlp.{name}_proj")) for name in names)
        )

    def trunk(self, model: nn.Module) -> nn.Module:
        """Everything below the head: token ids to the hidden states that the head reads."""
        return model.get_submodule("model")

    def head(self, model: nn.Module) -> nn.Linear:
        """The output projection, without bias: logits = hidden @ weight.T."""
        return cast(nn.Linear, model.get_submodule("lm_head"))

    def ffn_tensor(self, layer: int, projection: str) -> str:
        """Name of `gate`, `up` or `down` of a layer, in LLaMA's form."""
        return f"model.layers.{layer}.mlp.{projection}_proj.weight"

    def stored(self, config: Any, name: str) -> TensorPart:
        """Where the tensor of that name in LLaMA's form lies in a checkpoint of this family."""
        return TensorPart(name)


class _Mistral(Family):
    """LLaMA with an optional sliding attention window on every layer."""

    def traits(self, config: Any) -> DecoderTraits:
        return DecoderTraits(head_dim=head_dim(config), sliding_window=config.sliding_window)


class _Phi3(_Mistral):
    """Phi-3 and Phi-4: fused projections; in memory they stay fused."""

    def refusal(self, config: Any) -> str | None:
        rope = config.rope_parameters
        if rope["rope_type"] == "longrope":  # Transformers' name for su and, in this family, yarn
            return (
                "rope_type is 'longrope' in this phi3 config, as in Phi-3 with 128k of context and "
                "Phi-4-mini: its rotary frequencies change with the length of the text, and "
                "runtimes choose them by different rules. Choose the model with the short context."
            )
        factor = rope.get("partial_rotary_factor", 1.0)
        if factor != 1:
            return (
                f"partial_rotary_factor is {factor} in this phi3 config, but whole heads must be "
                "rotated (factor 1) to be exported exactly. Choose a model without it."
            )
        return super().refusal(config)

    def ffn(self, layer: nn.Module) -> GatedFFN:
        fused = cast(nn.Linear, layer.get_submodule("mlp.gate_up_proj"))
        down = cast(nn.Linear, layer.get_submodule("mlp.down_proj"))
        width = down.weight.shape[1]
        return GatedFFN(Rows(fused, 0, width), Rows(fused, width, 2 * width), down)

    def stored(self, config: Any, name: str) -> TensorPart:
        query = config.num_attention_heads * head_dim(config)
        key = query + config.num_key_value_heads * head_dim(config)
        value = key + config.num_key_value_heads * head_dim(config)
        width = config.intermediate_size
        rows_of = {
            "q_proj": ("qkv_proj", (0, query)),
            "k_proj": ("qkv_proj", (query, key)),
            "v_proj": ("qkv_proj", (key, value)),
            "gate_proj": ("gate_up_proj", (0, width)),
            "up_proj": ("gate_up_proj", (width, 2 * width)),
        }
        module, _, kind = name.rpartition(".")
        block, _, projection = module.rpartition(".")
        if projection not in rows_of:
            return TensorPart(name)
        fused, rows = rows_of[projection]
        return TensorPart(f"{block}.{fused}.{kind}", rows)


class _Qwen2(Family):
    """Qwen2 and Qwen2.5: biases on the query, key and value projections."""

    def traits(self, config: Any) -> DecoderTraits:
        return DecoderTraits(
            head_dim=head_dim(config), qkv_bias=True, sliding_window=_qwen_window(config)
        )


class _Qwen3(Family):
    """Qwen3: an RMSNorm on each query and key head, and an explicit head width."""

    def traits(self, config: Any) -> DecoderTraits:
        plain = super().traits(config)
        return replace(plain, qk_norm="head", sliding_window=_qwen_window(config))


class _Granite(Family):
    """Granite 3: constant factors on embeddings, residuals, attention scores and logits."""

    def traits(self, config: Any) -> DecoderTraits:
        plain = super().traits(config)
        is_usual = config.attention_multiplier == plain.head_dim**-0.5
        multipliers = Multipliers(
            embedding=float(config.embedding_multiplier),
            residual=float(config.residual_multiplier),
            attention=None if is_usual else float(config.attention_multiplier),
            logits_divisor=float(config.logits_scaling),
        )
        return replace(plain, multipliers=multipliers)


class _Olmo2(Family):
    """OLMo-2: RMSNorms after attention and FFN, and over all query and all key heads at once."""

    def traits(self, config: Any) -> DecoderTraits:
        return replace(super().traits(config), qk_norm="full", norms_after=True)


FAMILIES: dict[str, Family] = {
    "llama": Family("llama"),
    "mistral": _Mistral("mistral"),
    "qwen2": _Qwen2("qwen2"),
    "qwen3": _Qwen3("qwen3"),
    "granite": _Granite("granite"),
    "olmo2": _Olmo2("olmo2"),
    "phi3": _Phi3("phi3"),
}


def head_dim(config: Any) -> int:
    """Width of one attention head: stated in the config, else hidden_size / heads."""
    stated = getattr(config, "head_dim", None)
    return int(stated or config.hidden_size // config.num_attention_heads)


def _qwen_window(config: Any) -> int | None:
    """Window of a Qwen config; full attention equals that of all layers up to the window."""
    return config.sliding_window if "sliding_attention" in config.layer_types else None


def family_of(config: Any) -> Family:
    """The family of a Hugging Face config.

    Raises:
        UserError: Unknown model type, or one that cannot be converted, with the reason.
    """
    model_type = config.model_type
    if model_type not in FAMILIES:
        why = reason(config)
        # No slip of the pen where Transformers knows the type: olmo3 is not meant to be olmo2.
        is_slip = why is None and model_type not in CONFIG_MAPPING
        raise UserError(
            f"model_type is {model_type!r}, which dotmoe cannot convert"
            f"{f': {why}' if why else ''}. Families: {', '.join(FAMILIES)}."
            f"{nearest(model_type, FAMILIES) if is_slip else ''}"
        )
    family = FAMILIES[model_type]
    experts = expert_count(config)
    if experts is not None:
        raise UserError(
            f"{experts[0]} is {experts[1]} in this {model_type} config, but only a dense model can "
            "be split, and this is a Mixture-of-Experts already. Choose a dense one."
        )
    why = family.refusal(config)
    if why is not None:
        raise UserError(why)
    return family


@dataclass(frozen=True, kw_only=True, slots=True)
class Widths:
    """Sizes of a dense model that decide how it can be split."""

    model: int
    ffn: int
    layers: int
    vocabulary: int
    context: int


def widths_of(config: Any) -> Widths:
    """Sizes read from a Hugging Face config."""
    return Widths(
        model=config.hidden_size,
        ffn=config.intermediate_size,
        layers=config.num_hidden_layers,
        vocabulary=config.vocab_size,
        context=config.max_position_embeddings,
    )
