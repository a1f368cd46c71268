"""Controls that show what the choice of experts is worth: random, as stored, static.

`random_split` is LLaMA-MoE v1's independent random split: every neuron gets one label, every label
equally often, in random order. Different here: each layer's order has its own seed; the random
router is one linear map, not the two-layer gate with noise, which no stock architecture holds.

`contiguous_split` makes each expert of s consecutive neurons in stored order, as LLaMA-MoE v2's
instructions do by default. Different here: random router entries are normal instead of
Kaiming-uniform, and our plain sum needs no scale factor.

`static_pruning` keeps the neurons of largest mean energy, as many as a conversion runs for a token,
and leaves all others out: every expert runs for every token. Compare it to see what routing adds.
"""

from collections.abc import Iterator

import torch

from dotmoe.method.layout import ALWAYS_ON, DROPPED
from dotmoe.rivals.baselines.contract import LayerSplit, SplitInputs


def dealt(inputs: SplitInputs, *, at_random: bool) -> Iterator[LayerSplit]:
    """Assign every layer's neurons to experts at random, or in consecutive runs as stored."""
    split, width = inputs.granularity, inputs.granularity.units
    for layer in inputs.layers():
        generator = layer.generator
        order_N = torch.randperm(width, generator=generator) if at_random else torch.arange(width)
        # Normal entries; their common scale changes no routing.
        router_ED = torch.randn(split.num_experts, layer.x_TD.shape[1], generator=generator)
        yield LayerSplit(layer, order_N // split.expert_size, router_ED.to(layer.x_TD.device))


def static_pruning(inputs: SplitInputs) -> Iterator[LayerSplit]:
    """Keep each layer's neurons of largest mean energy; the router has no choice."""
    split = inputs.granularity
    for layer in inputs.layers():
        rank_N = layer.energy().mean(dim=0).argsort(descending=True).argsort()
        expert_N = (rank_N - split.shared_size).div(split.expert_size, rounding_mode="floor")
        expert_N[expert_N >= split.num_experts] = DROPPED
        expert_N[rank_N < split.shared_size] = ALWAYS_ON
        shape = split.num_experts, layer.x_TD.shape[1]
        router_ED = torch.randn(shape, generator=layer.generator)  # all experts run: any will do
        yield LayerSplit(layer, expert_N, router_ED.to(layer.x_TD.device))
