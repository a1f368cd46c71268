"""Neurons dealt to experts at random: LLaMA-MoE v1's independent random split.

From the original: every neuron gets one label, every label equally often, in random order; the
router starts at random, and continued pretraining has to do the rest. Different here: the order has
a seed (the original's has none), each layer its own; the random router is one linear map, not the
two-layer gate with noise, which no stock architecture holds.
"""

from collections.abc import Iterator

import torch

from dotmoe.baselines.method import Given, Layer, LayerSplit


def random_split(given: Given) -> Iterator[LayerSplit]:
    """Split every layer at random."""
    split = given.granularity
    for layer in given.layers():
        order_N = torch.randperm(split.ffn_width, generator=layer.generator)
        yield LayerSplit(
            layer=layer,
            expert_of_neuron_N=order_N // split.expert_size,
            router_ED=random_router(layer, split.num_experts),
        )


def random_router(layer: Layer, num_experts: int) -> torch.Tensor:
    """Router rows from a normal distribution; their common scale changes no routing."""
    width = layer.x_TD.shape[1]
    router_ED = torch.randn(num_experts, width, generator=layer.generator)
    return router_ED.to(layer.x_TD.device)
