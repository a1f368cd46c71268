"""What servers are known to get wrong about an export that is right, read off its config.

Transformers computes all of these. Each was found in a server's source; tests/serving keeps where.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Config = Mapping[str, Any]


class _Limit(NamedTuple):
    """Something that a server cannot do although the format, a `model_type`, can."""

    servers: tuple[str, ...]
    formats: tuple[str, ...]
    meets: Callable[[Config], bool]
    says: str


def _scales_rope(config: Config) -> bool:
    rope = config["rope_parameters"]
    return bool(rope["rope_type"] != "default" or rope["rope_theta"] % 1)


def _slides(config: Config) -> bool:
    window = config["sliding_window"]
    return window is not None and window < config["max_position_embeddings"]


_LIMITS = (
    _Limit(
        ("vLLM",),
        ("qwen3_moe",),
        lambda config: config["attention_bias"],
        "The output projection of attention has no bias: o_proj.bias is dropped without a word.",
    ),
    _Limit(
        ("vLLM", "SGLang"),
        ("granitemoe", "granitemoeshared"),
        lambda config: config["attention_bias"],
        "Attention has no biases: all of them are dropped without a word.",
    ),
    _Limit(
        ("SGLang",),
        ("glm4_moe",),
        lambda config: config["n_shared_experts"] > 1,
        "On NVIDIA GPUs the shared expert is run as one more routed expert, which works for a "
        "single one only: more than one stops the load, unless --disable-shared-experts-fusion is "
        "given.",
    ),
    _Limit(
        ("SGLang",),
        ("mixtral",),
        lambda config: config["head_dim"] != config["hidden_size"] // config["num_attention_heads"],
        "head_dim is not read: heads wider than hidden_size / heads are cut without a word, "
        "narrower ones stop the load.",
    ),
    _Limit(
        ("SGLang",),
        ("mixtral", "granitemoe", "granitemoeshared"),
        _scales_rope,
        "RoPE scaling is not read, and rope_theta is cut to a whole number.",
    ),
    _Limit(
        ("SGLang",),
        ("mixtral",),
        _slides,
        "The sliding window is not read: right only up to the window (--context-length).",
    ),
    _Limit(
        ("SGLang",),
        ("qwen2_moe", "qwen3_moe"),
        lambda config: bool(config["mlp_only_layers"]),
        "Every layer is built with experts, whatever mlp_only_layers says: the tensors of a "
        "dense layer are skipped and its experts stay unset.",
    ),
)


def limits_met(config: Config) -> list[str]:
    """The limits that an exported config runs into, each as a sentence with the server's name."""
    return [
        f"{server}: {limit.says}"
        for limit in _LIMITS
        if config["model_type"] in limit.formats and limit.meets(config)
        for server in limit.servers
    ]
