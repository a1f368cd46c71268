"""Neurons that are active together: MoEfication's co-activation split.

From the original: a graph of neurons whose edges count the tokens on which both are active, cut
into equal parts such that most edge weight stays inside them; routers by similarity, or trained
(`predictor.py`).
Different here: SiLU has no zeros, so a neuron counts as active on a token if its |H| is among the
share of the token's neurons that the budget lets run. The cut is not METIS's: the same objective,
edge weight inside equal parts, is raised by balanced kernel k-means from several seeded starts,
then by swapping pairs of neurons (Kernighan and Lin's step) until no swap raises it. No threshold
on the counts and no rebalancing at random: parts come out equal.
"""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dotmoe.baselines.contract import LayerSplit, SplitInputs, balanced_clusters
from dotmoe.baselines.predictor import predictor
from dotmoe.baselines.without_data import similarity_router
from dotmoe.calibrate import activations

_SCREENED = 256
"""Neurons that are looked at together for gainful swaps."""


def co_activation(inputs: SplitInputs) -> Iterator[LayerSplit]:
    """Split every layer by a balanced cut of its co-activation graph."""
    split = inputs.granularity
    for layer in inputs.layers():
        hidden_TN = activations(layer.ffn, layer.x_TD.to(layer.ffn.down.weight.dtype))
        count_NN = co_activation_counts(hidden_TN, split.active_units)
        expert_N = balanced_clusters(
            partial(_weight_to, count_NN),
            len(count_NN),
            split.num_experts,
            inputs.config,
            layer.generator,
        )
        expert_N = swapped(count_NN, expert_N, split.num_experts)
        router_ED = similarity_router(layer, expert_N, split.num_experts)
        own = predictor(layer, expert_N, router_ED, inputs.config)
        yield LayerSplit(layer=layer, expert_of_neuron_N=expert_N, router_ED=router_ED, own=own)


def co_activation_counts(
    hidden_TN: Float[Tensor, "T N"], active_neurons: int
) -> Float[Tensor, "N N"]:
    """Tokens on which both neurons are among the `active_neurons` of largest |H|; diagonal 0."""
    strongest = hidden_TN.abs().topk(active_neurons, dim=1).indices
    is_active_TN = torch.zeros_like(hidden_TN).scatter_(1, strongest, 1.0)
    return (is_active_TN.T @ is_active_TN).fill_diagonal_(0)


def swapped(
    count_NN: Float[Tensor, "N N"], expert_N: Int[Tensor, " N"], num_experts: int
) -> Int[Tensor, " N"]:
    """The cut after swapping pairs of neurons until no swap raises the weight inside.

    Edge weights are symmetric with diagonal 0.
    """
    expert_N = expert_N.clone()
    to_NE = _weight_to(count_NN, F.one_hot(expert_N, num_experts))

    def gains(rows: Tensor) -> Tensor:
        """Half of what swapping one of `rows` with any neuron adds to the weight inside, [R, N]."""
        own_R = expert_N[rows]
        kept_N = to_NE.gather(1, expert_N[:, None]).squeeze(1)
        gain_RN = to_NE[:, own_R].T - kept_N + to_NE[rows][:, expert_N] - kept_N[rows, None]
        gain_RN -= 2 * count_NN[rows]
        return gain_RN.masked_fill_(own_R[:, None] == expert_N, 0.0)

    every_N = torch.arange(len(expert_N), device=expert_N.device)
    while True:
        # Only neurons with a gainful swap are gone through one by one.
        gainful = [gains(rows).amax(dim=1) > 0 for rows in torch.split(every_N, _SCREENED)]
        chosen = every_N[torch.cat(gainful)]
        if not len(chosen):
            return expert_N
        for neuron in chosen:
            gain, other = gains(neuron[None]).squeeze(0).max(dim=0)
            if float(gain) > 0:
                own, target = expert_N[neuron].clone(), expert_N[other].clone()
                change_N = count_NN[:, neuron] - count_NN[:, other]
                to_NE[:, own] -= change_N
                to_NE[:, target] += change_N
                expert_N[neuron], expert_N[other] = target, own


def _weight_to(count_NN: Tensor, members_NE: Tensor) -> Tensor:
    """Edge weight of each neuron to each expert's members."""
    return count_NN @ members_NE.to(count_NN)
