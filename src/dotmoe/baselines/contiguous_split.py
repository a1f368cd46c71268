"""Neurons in the order they are stored, s after s: what LLaMA-MoE v2's instructions do by default.

From the original: sequential slices of the FFN, and a router with random entries. Different here:
random entries are normal instead of Kaiming-uniform; which experts run does not depend on that in
distribution. The scale factor of its experts' sum is not needed, since ours is a plain sum.
"""

from collections.abc import Iterator

import torch

from dotmoe.baselines.method import Given, LayerSplit
from dotmoe.baselines.random_split import random_router


def contiguous_split(given: Given) -> Iterator[LayerSplit]:
    """Split every layer into runs of neighbouring neurons."""
    split = given.granularity
    for layer in given.layers():
        yield LayerSplit(
            layer=layer,
            expert_of_neuron_N=torch.arange(split.ffn_width) // split.expert_size,
            router_ED=random_router(layer, split.num_experts),
        )
