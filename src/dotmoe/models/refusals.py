"""Model types that are known and cannot be converted, with the reason."""

from typing import Any

_MOE = "it is a Mixture-of-Experts already, and only a dense model can be split"
_GELU = (
    "its FFNs are gated by GELU, those of the MoE architectures that servers run are gated by SiLU"
)
_SANDWICH = f"{_GELU}, and it has norms on both sides of attention and FFN"
_RELU = "its FFNs are gated by a squared ReLU and not by SiLU"
_NO_GATE = "its FFNs have no gate projection, and experts are cut from SiLU-gated FFNs"
_LAYER_NORM = "its norms are LayerNorms, where the MoE architectures have RMSNorms"
_PARTIAL = "it rotates only a part of each attention head"
_LATENT = "it attends through compressed keys and values (MLA), which its MoE twins have not"
_NO_ROPE = "some of its layers have no rotary embedding, which no MoE architecture can hold"
_RECURRENT = "its tokens are mixed by recurrent or convolutional layers, not by attention alone"
_HYBRID = "its FFNs are the shared part of a hybrid of attention, recurrent layers and experts"
_WRAPPER = "it wraps a language model for more than text, and only a plain one can be split"

REASONS: dict[str, tuple[str, ...]] = {
    _MOE: (
        *("dbrx", "deepseek", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4"),
        *("dots1", "flex_olmo", "gpt_oss", "jamba", "llama4", "llama4_text", "longcat_flash"),
        *("mimo_v2_flash", "minimax", "minimax_m2", "mixtral", "qwen3_next", "solar_open"),
    ),
    _GELU: ("gemma", "vaultgemma"),
    _SANDWICH: ("gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text"),
    _RELU: ("bitnet",),
    _NO_GATE: (
        *("apertus", "arcee", "biogpt", "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode"),
        *("gpt_neo", "gpt_neox", "gptj", "jais2", "mpt", "nanochat", "nemotron", "opt"),
        *("persimmon", "phi", "starcoder2", "xglm"),
    ),
    _LAYER_NORM: ("cohere", "cohere2", "olmo", "stablelm"),
    _PARTIAL: ("glm", "glm4"),
    _LATENT: ("minicpm3", "youtu"),
    _NO_ROPE: ("smollm3",),
    _RECURRENT: (
        *("bamba", "falcon_h1", "falcon_mamba", "lfm2", "mamba", "mamba2", "nemotron_h"),
        *("olmo_hybrid", "qwen3_5", "qwen3_5_text", "recurrent_gemma", "rwkv", "zamba", "zamba2"),
    ),
    _HYBRID: ("granitemoehybrid",),
    _WRAPPER: (
        *("idefics2", "idefics3", "internvl", "llava", "llava_next", "llava_onevision", "mistral3"),
        *("mllama", "paligemma", "phi4_multimodal", "qwen2_5_omni", "qwen2_5_vl", "qwen2_audio"),
        *("qwen2_vl", "qwen3_vl", "smolvlm"),
    ),
}
"""Model types by what is in the way."""

_REASON_OF = {model_type: reason for reason, types in REASONS.items() for model_type in types}

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Config keys for the experts of a layer."""


def unknown_type_reason(config: Any) -> str | None:
    """Why a model whose type is no family cannot be converted, or None where nothing is known."""
    model_type = config.model_type
    if model_type in _REASON_OF:
        return _REASON_OF[model_type]
    if "moe" in model_type or expert_count(config) is not None:
        return _MOE
    if hasattr(config, "text_config"):
        return _WRAPPER
    return None


def expert_count(config: Any) -> tuple[str, int] | None:
    """The key of a config that says that its layers have experts, and how many; None: dense."""
    for key in EXPERT_COUNTS:
        count = getattr(config, key, None)
        if isinstance(count, int) and count > 1:
            return key, count
    return None
