"""Model types that people try and that cannot be converted, with the reason."""

from typing import Any

MOE = "it is a Mixture-of-Experts already, and only a dense model can be split"
WRAPPER = "it wraps a language model for more than text, and only a plain one can be split"
REASONS: dict[str, tuple[str, ...]] = {
    MOE: ("deepseek_v2", "deepseek_v3", "gpt_oss", "llama4", "mixtral", "qwen3_next"),
    WRAPPER: ("gemma3", "llava", "mistral3", "mllama", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"),
    "its FFNs are gated by GELU, those of the MoE architectures that servers run are gated by "
    "SiLU": ("gemma", "gemma2", "gemma3_text"),
    "its FFNs have no gate projection, and experts are cut from SiLU-gated FFNs": (
        *("bloom", "falcon", "gpt2", "gpt_neox", "gptj", "mpt", "opt", "phi", "starcoder2"),
    ),
    "its norms are LayerNorms, where the MoE architectures have RMSNorms": (
        *("cohere", "cohere2", "olmo", "stablelm"),
    ),
    "it rotates only a part of each attention head": ("glm", "glm4"),
    "some of its layers have no rotary embedding, which no MoE architecture can hold": ("smollm3",),
    "its tokens are mixed by recurrent or convolutional layers, not by attention alone": (
        *("falcon_h1", "granitemoehybrid", "lfm2", "mamba", "mamba2", "qwen3_5", "rwkv"),
    ),
}
"""Model types by what is in the way."""

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Config keys for the experts of a layer."""


def reason(config: Any) -> str | None:
    """Why a model whose type is no family cannot be converted; None where nothing is known."""
    for why, types in REASONS.items():
        if config.model_type in types:
            return why
    if "moe" in config.model_type or expert_count(config) is not None:
        return MOE
    return WRAPPER if hasattr(config, "text_config") else None


def expert_count(config: Any) -> tuple[str, int] | None:
    """The key of a config that says that its layers have experts, and how many; None: dense."""
    for key in EXPERT_COUNTS:
        count = getattr(config, key, None)
        if isinstance(count, int) and count > 1:
            return key, count
    return None
