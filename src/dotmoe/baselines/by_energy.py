"""Neurons in the order of their energy: as near to static pruning as equal experts come.

The first expert holds the neurons that contribute most on average, the last those that contribute
least, and a router row is the mean energy of its expert, the same for every token as far as a
linear router can: the mean input's direction. So the same experts run nearly always, which is what
pruning to the most energetic neurons would leave; what routing adds is seen beside it.
"""

from collections.abc import Iterator

from dotmoe.baselines.contract import LayerSplit, SplitInputs, means
from dotmoe.calibrate import contributions


def by_energy(inputs: SplitInputs) -> Iterator[LayerSplit]:
    """Split every layer into experts of falling mean energy."""
    split = inputs.granularity
    for layer in inputs.layers():
        x_TD = layer.x_TD.to(layer.ffn.down.weight.dtype)
        energy_N = contributions(layer.ffn, x_TD).square().mean(dim=0)
        rank_N = energy_N.argsort(descending=True).argsort()
        expert_N = rank_N // split.expert_size
        mean_energy_E1 = means(energy_N[:, None], expert_N, split.num_experts)
        router_ED = mean_energy_E1 * layer.x_TD.mean(dim=0)
        yield LayerSplit(layer=layer, expert_of_neuron_N=expert_N, router_ED=router_ED)
