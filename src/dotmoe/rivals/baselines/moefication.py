"""MoEfication: neurons clustered by the directions of their weights, or by joint activity.

`weight_clusters` is its parameter clustering and LLaMA-MoE v1's independent clustering: k-means,
with clusters of equal size, of a projection's rows scaled to unit length. Different here: rows of
the gate projection stand for MoEfication's only input projection (v1 takes gate or up), starts are
seeded, and v1's random gate is left out because MoEfication's is better.

`co_activation` cuts a graph of neurons, whose edges count the tokens on which both are active, into
equal parts that keep most edge weight inside them. Different here: SiLU has no zeros, so a neuron
counts as active on a token if its |H| is among the token's largest, as many as the budget lets run.
The cut is not METIS's: balanced kernel k-means from several seeded starts raises the edge weight
inside, then swaps of pairs of neurons (Kernighan and Lin's step) until no swap raises it. There is
no threshold on the counts, and parts have exactly equal size.

Both have MoEfication's two routers. By similarity: the cosine of the token with the mean of an
expert's unit rows; the token's norm does not change the order, so this is a linear map and can be
exported. Trained: Linear, tanh, Linear, one output per expert; the first starts as the mean unit
rows of the experts, the second as the identity. Targets are each expert's summed activation over
the largest one; binary cross-entropy, Adam with rate 0.01; the k largest outputs run. Different
here: SiLU has negative activations, so absolute values are summed; the pass with the least loss on
every tenth token, held out, is kept (published code: the second best).
"""

from collections.abc import Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dotmoe.method.calibrate import routed_sums
from dotmoe.method.router import top_k_mask
from dotmoe.rivals.baselines.contract import (
    Layer,
    LayerSplit,
    SplitInputs,
    balanced_clusters,
    balanced_kmeans,
    cluster_means,
    optimal_assignment,
    squared_distance,
)

_SCREENED = 256
"""Number of neurons that are screened together for swaps that gain."""
_EPOCHS, _TOKENS_A_STEP, _RATE = 30, 512, 0.01
"""Passes, tokens per step and learning rate of the predictor's training."""


def weight_clusters(inputs: SplitInputs) -> Iterator[LayerSplit]:
    """Split every layer by balanced clusters of its weights."""
    num_experts = inputs.granularity.num_experts
    for layer in inputs.layers():
        rows_ND = F.normalize(layer.ffn.gate.weight.float(), dim=1)
        expert_N = balanced_kmeans(rows_ND, num_experts, layer.generator)
        centre_ED = cluster_means(rows_ND, expert_N, num_experts)
        yield _routed(inputs, layer, optimal_assignment(squared_distance(rows_ND, centre_ED)))


def co_activation(inputs: SplitInputs) -> Iterator[LayerSplit]:
    """Split every layer by a balanced cut of its co-activation graph."""
    split = inputs.granularity
    for layer in inputs.layers():
        count_NN = co_activation_counts(layer.hidden(), split.active_units)
        score = partial(_weight_to, count_NN)
        expert_N = balanced_clusters(score, split.units, split.num_experts, layer.generator)
        yield _routed(inputs, layer, swapped(count_NN, expert_N, split.num_experts))


def _routed(inputs: SplitInputs, layer: Layer, expert_N: Int[Tensor, " N"]) -> LayerSplit:
    """The split with the router by similarity, and the trained one if `split_router` is `own`."""
    rows_ND = F.normalize(layer.ffn.gate.weight.float(), dim=1)
    router_ED = F.normalize(cluster_means(rows_ND, expert_N, inputs.granularity.num_experts), dim=1)
    is_own = inputs.config.split_router == "own"
    own = predictor(layer, expert_N, router_ED) if is_own else {}
    return LayerSplit(layer, expert_N, router_ED, own)


def co_activation_counts(hidden_TN: Tensor, active_neurons: int) -> Float[Tensor, "N N"]:
    """Number of tokens with both neurons among the `active_neurons` largest |H|; diagonal 0."""
    is_active_TN = top_k_mask(hidden_TN.abs(), active_neurons)
    return (is_active_TN.T @ is_active_TN).fill_diagonal_(0)


def swapped(count_NN: Tensor, expert_N: Tensor, num_experts: int) -> Int[Tensor, " N"]:
    """The experts after swapping pairs of neurons until no swap raises the edge weight inside them.

    `count_NN` holds edge weights, symmetric with diagonal 0.
    """
    expert_N = expert_N.clone()
    to_NE = _weight_to(count_NN, F.one_hot(expert_N, num_experts))

    def gains(rows: Tensor) -> Tensor:
        """Half the gain in inside weight from swapping each of `rows` with each neuron, [R, N]."""
        own_R = expert_N[rows]
        kept_N = to_NE.gather(1, expert_N[:, None]).squeeze(1)
        gain_RN = to_NE[:, own_R].T - kept_N + to_NE[rows][:, expert_N] - kept_N[rows, None]
        gain_RN -= 2 * count_NN[rows]
        return gain_RN.masked_fill_(own_R[:, None] == expert_N, 0.0)

    every_N = torch.arange(len(expert_N), device=expert_N.device)
    while True:
        # Only neurons that some swap could improve are tried one by one.
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
    """Summed edge weight from each neuron to each expert's members."""
    return count_NN @ members_NE.to(count_NN)


@torch.enable_grad()
def predictor(layer: Layer, expert_N: Tensor, centre_ED: Tensor) -> dict[str, Tensor]:
    """Weights of the trained router: `first` [E, D], `second` [E, E]."""
    with torch.no_grad():
        target_TE = routed_sums(layer.hidden().abs(), expert_N, len(centre_ED))
        target_TE /= target_TE.amax(dim=1, keepdim=True).clamp_min(1e-30)
    is_heldout_T = torch.arange(len(target_TE), device=target_TE.device) % 10 == 9
    trained_T = (~is_heldout_T).nonzero().squeeze(1)
    weights = {"first": centre_ED.clone(), "second": torch.eye(len(centre_ED)).to(centre_ED)}
    adam = torch.optim.Adam([w.requires_grad_() for w in weights.values()], lr=_RATE)

    def loss(tokens_T: Tensor) -> Tensor:
        logits_TE = _scores(weights, layer.x_TD[tokens_T])
        return F.binary_cross_entropy_with_logits(logits_TE, target_TE[tokens_T])

    best = {}
    least = torch.inf
    for _ in range(_EPOCHS):
        order = torch.randperm(len(trained_T), generator=layer.generator)
        for part in torch.split(trained_T[order.to(trained_T.device)], _TOKENS_A_STEP):
            adam.zero_grad()
            loss(part).backward()  # type: ignore[no-untyped-call]
            adam.step()
        with torch.no_grad():
            reached = float(loss(is_heldout_T))
        if not reached >= least:  # NaN if no token is held out: then the last pass is kept
            least = reached
            best = {name: weight.detach().clone() for name, weight in weights.items()}
    return best


def _scores(own: Mapping[str, Tensor], x_TD: Tensor) -> Float[Tensor, "T E"]:
    return torch.tanh(x_TD.float() @ own["first"].T) @ own["second"].T


def by_predictor(own: Mapping[str, Tensor], x_TD: Tensor, hidden_TN: Tensor, k: int) -> Tensor:
    """The k experts that the trained router scores highest."""
    return top_k_mask(_scores(own, x_TD), k)
