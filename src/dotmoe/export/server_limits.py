"""What servers are known to get wrong about an export that is right, read off its config.

Transformers computes all of these. Each was found in a server's source; tests/serving keeps where.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLimit:
    """Something that a server cannot do although the format can."""

    servers: tuple[str, ...]
    formats: tuple[str, ...]
    """`model_type` of the configs that it is about."""
    meets: Callable[[Config], bool]
    """Whether a config runs into it."""
    says: str
    """What happens, in a sentence."""


def _scales_rope(config: Config) -> bool:
    rope = config["rope_parameters"]
    return bool(rope["rope_type"] != "default" or rope["rope_theta"] % 1)


def _slides(config: Config) -> bool:
    window = config["sliding_window"]
    return window is not None and window < config["max_position_embeddings"]


SERVER_LIMITS = (
    ServerLimit(
        servers=("vLLM",),
        formats=("qwen3_moe",),
        meets=lambda config: config["attention_bias"],
        says="The output projection of attention has no bias: o_proj.bias is dropped without a "
        "word.",
    ),
    ServerLimit(
        servers=("vLLM", "SGLang"),
        formats=("granitemoe", "granitemoeshared"),
        meets=lambda config: config["attention_bias"],
        says="Attention has no biases: all of them are dropped without a word.",
    ),
    ServerLimit(
        servers=("SGLang",),
        formats=("glm4_moe",),
        meets=lambda config: config["n_shared_experts"] > 1,
        says="On NVIDIA GPUs the shared expert is run as one more routed expert, which works for a "
        "single one only: more than one stops the load, unless --disable-shared-experts-fusion is "
        "given.",
    ),
    ServerLimit(
        servers=("SGLang",),
        formats=("mixtral",),
        meets=lambda config: (
            config["head_dim"] != config["hidden_size"] // config["num_attention_heads"]
        ),
        says="head_dim is not read: heads wider than hidden_size / heads are cut without a word, "
        "narrower ones stop the load.",
    ),
    ServerLimit(
        servers=("SGLang",),
        formats=("mixtral", "granitemoe", "granitemoeshared"),
        meets=_scales_rope,
        says="RoPE scaling is not read, and rope_theta is cut to a whole number.",
    ),
    ServerLimit(
        servers=("SGLang",),
        formats=("mixtral",),
        meets=_slides,
        says="The sliding window is not read: right only up to the window (--context-length).",
    ),
    ServerLimit(
        servers=("SGLang",),
        formats=("qwen2_moe", "qwen3_moe"),
        meets=lambda config: bool(config["mlp_only_layers"]),
        says="Every layer is built with experts, whatever mlp_only_layers says: the tensors of a "
        "dense layer are skipped and its experts stay unset.",
    ),
)


def limits_met(config: Config) -> list[str]:
    """The limits that an exported config runs into, each as a sentence with the server's name."""
    return [
        f"{server}: {limit.says}"
        for limit in SERVER_LIMITS
        if config["model_type"] in limit.formats and limit.meets(config)
        for server in limit.servers
    ]
