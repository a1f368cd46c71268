"""Tiny models of every family with its peculiarities of attention, and a split of their heads."""

from runs import GRANITE_FACTORS

FAMILIES = {
    "llama": {"attention_bias": True, "head_dim": 24},
    "mistral": {"sliding_window": 8, "num_key_value_heads": 4},
    "qwen2": {"num_key_value_heads": 1},
    "qwen3": {"head_dim": 32},
    "granite": GRANITE_FACTORS,
    "olmo2": {},
    "phi3": {"sliding_window": 8},
    "cwm": {"sliding_window": 8},
    "seed_oss": {},
}
"""By family: biases, head_dim other than width / heads, MHA, GQA and MQA, windows, multipliers."""
HEADS = {"num_experts": 4, "active_experts": 2, "target": "attention"}
"""A split of the four heads of a layer."""
