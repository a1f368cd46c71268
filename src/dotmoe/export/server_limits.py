"""What servers are known to get wrong about an export that is right, read off its config.

Transformers computes all of these. Each was found in a server's source; tests/serving keeps where.
"""

from collections.abc import Mapping
from typing import Any

_GRANITE = ("granitemoe", "granitemoeshared")
_LIMITS = (
    (
        *("biases", ("vLLM",), ("qwen3_moe",)),
        "The output projection of attention has no bias: o_proj.bias is dropped without a word.",
    ),
    (
        *("biases", ("vLLM", "SGLang"), _GRANITE),
        "Attention has no biases: all of them are dropped without a word.",
    ),
    (
        *("shared experts", ("SGLang",), ("glm4_moe",)),
        "On NVIDIA GPUs the shared expert is run as one more routed expert, which works for a "
        "single one only: more than one stops the load, unless --disable-shared-experts-fusion is "
        "given.",
    ),
    (
        *("head width", ("SGLang",), ("mixtral",)),
        "head_dim is not read: heads wider than hidden_size / heads are cut without a word, "
        "narrower ones stop the load.",
    ),
    (
        *("scaled RoPE", ("SGLang",), ("mixtral", *_GRANITE)),
        "RoPE scaling is not read, and rope_theta is cut to a whole number.",
    ),
    (
        *("window", ("SGLang",), ("mixtral",)),
        "The sliding window is not read: right only up to the window (--context-length).",
    ),
    (
        *("dense layers", ("llama.cpp",), ("qwen2_moe",)),
        "This architecture cannot be loaded with dense layers.",
    ),
    (
        *("dense layers", ("SGLang",), ("qwen2_moe", "qwen3_moe")),
        "Every layer is built with experts, whatever mlp_only_layers says: the tensors of a "
        "dense layer are skipped and its experts stay unset.",
    ),
)
"""A feature, the servers that cannot do it in these `model_type`s, and what they do instead."""


def limits_met(config: Mapping[str, Any]) -> list[str]:
    """The limits that an exported config runs into, each as a sentence with the server's name."""
    rope, window = config["rope_parameters"], config.get("sliding_window")
    has = {
        "biases": config.get("attention_bias"),
        "shared experts": config.get("n_shared_experts", 0) > 1,
        "head width": config["head_dim"] * config["num_attention_heads"] != config["hidden_size"],
        "scaled RoPE": rope["rope_type"] != "default" or rope["rope_theta"] % 1,
        "window": window is not None and window < config["max_position_embeddings"],
        "dense layers": config.get("mlp_only_layers"),
    }
    return [
        f"{server}: {says}"
        for feature, servers, formats, says in _LIMITS
        if has[feature] and config["model_type"] in formats
        for server in servers
    ]
