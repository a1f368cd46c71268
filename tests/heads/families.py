"""Tiny models of every family with its peculiarities of attention, and layouts of their heads."""

import torch

from dotmoe.method.layout import ExpertLayout
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


def head_layout(dense, *, active_experts, size=1):
    """Experts of `size` of the four heads, at random; the routers spread well."""
    layers, width = dense.widths.layers, dense.widths.model
    generator = torch.Generator().manual_seed(3)
    order = [torch.randperm(4, generator=generator) // size for _ in range(layers)]
    router = torch.randn(layers, 4 // size, width, generator=generator) * 1.5 / width**0.5
    return ExpertLayout(
        expert_of_neuron_LN=torch.stack(order),
        router_LED=router,
        active_experts=active_experts,
        target="attention",
    )
