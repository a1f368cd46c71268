"""Balanced clusters: k-means with clusters of one size, and the exact assignment that ends it.

The rivals assign exactly, by Jonker-Volgenant on a square matrix with every expert's column
repeated, or by minimum-cost flow. `optimal_assignment` finds the same optimum without that matrix:
it starts at our transport solver's rounded plan and cancels negative cycles between experts.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dotmoe.calibrate import harden

_NEAR = 0.02
"""Temperature of the start, in units of the spread of the costs."""


def optimal_assignment(cost_NE: Float[Tensor, "N E"]) -> Int[Tensor, " N"]:
    """Assignment of N items to E experts, N / E each, whose summed cost no other undercuts.

    An assignment is optimal if and only if no cycle of experts a -> b -> ... -> a gains by passing
    one item along each arrow (Klein's theorem on minimum-cost flows).

    Args:
        cost_NE: Cost of item n in expert e, finite; N must be a multiple of E.

    Returns:
        Expert of each item, on the device of the costs.
    """
    if float(cost_NE.std()) == 0:
        return torch.arange(len(cost_NE), device=cost_NE.device) // (
            len(cost_NE) // cost_NE.shape[1]
        )
    start_N = harden(-cost_NE.float(), relative_tau=_NEAR)
    exchange = _Exchange(cost_NE.double().cpu(), start_N.cpu())
    cycle = exchange.negative_cycle()
    while cycle:
        exchange.cancel(cycle)
        cycle = exchange.negative_cycle()
    return exchange.expert_N.to(cost_NE.device)


class _Exchange:
    """The experts as a graph: arrow a -> b costs what it takes to pass a's cheapest item to b."""

    def __init__(self, cost_NE: Tensor, expert_N: Tensor) -> None:
        self.cost_NE = cost_NE
        self.expert_N = expert_N
        num_experts = cost_NE.shape[1]
        self.price_EE = torch.zeros(num_experts, num_experts, dtype=torch.float64)
        self.item_EE = torch.zeros(num_experts, num_experts, dtype=torch.long)
        # Gains below what float64 sums can resolve would be exchanged back and forth.
        self.least_gain = 1e-12 * float(cost_NE.abs().max())
        for expert in range(num_experts):
            self._price(expert)

    def negative_cycle(self) -> list[int]:
        """Experts along a cycle that lowers the cost, in the order items move; empty: optimal."""
        num_experts = len(self.price_EE)
        distance_E = torch.zeros(num_experts, dtype=torch.float64)
        before_E = torch.full((num_experts,), -1)
        for _ in range(num_experts):
            through_E, previous_E = (distance_E[:, None] + self.price_EE).min(dim=0)
            is_shorter = through_E < distance_E - self.least_gain
            if not bool(is_shorter.any()):
                return []
            before_E = torch.where(is_shorter, previous_E, before_E)
            distance_E = torch.where(is_shorter, through_E, distance_E)
            cycle = _cycle(before_E.tolist())
            if cycle:
                return cycle
        return []

    def cancel(self, cycle: list[int]) -> None:
        """Pass one item along each arrow of a cycle."""
        arrows = list(zip(cycle, cycle[1:] + cycle[:1], strict=True))
        items = [int(self.item_EE[arrow]) for arrow in arrows]
        for item, (_, target) in zip(items, arrows, strict=True):
            self.expert_N[item] = target
        for expert in cycle:
            self._price(expert)

    def _price(self, expert: int) -> None:
        items = (self.expert_N == expert).nonzero().squeeze(1)
        change = self.cost_NE[items] - self.cost_NE[items, expert, None]
        self.price_EE[expert], nearest = change.min(dim=0)
        self.item_EE[expert] = items[nearest]


def _cycle(before: list[int]) -> list[int]:
    """A cycle of the graph in which each node has at most one predecessor, in forward order."""
    seen_from = [-1] * len(before)
    for first in range(len(before)):
        node = first
        while node >= 0 and seen_from[node] < 0:
            seen_from[node] = first
            node = before[node]
        if node >= 0 and seen_from[node] == first:
            backward = [node]
            while before[backward[-1]] != node:
                backward.append(before[backward[-1]])
            return backward[::-1]
    return []


def balanced_kmeans(
    features_NF: Float[Tensor, "N F"],
    num_clusters: int,
    *,
    rounds: int,
    starts: int,
    generator: torch.Generator,
    is_exact: bool = True,
) -> Int[Tensor, " N"]:
    """Clusters of equal size with small squared distances to their centres.

    Within the rounds the balanced assignment is our transport solver's.

    Args:
        features_NF: What is clustered, float32; N must be a multiple of the number of clusters.
        num_clusters: E.
        rounds: Rounds at most of each start; fewer where nothing moves any more.
        starts: Random starts; that with the smallest distances is kept.
        generator: Picks the first centres among the items.
        is_exact: Whether the last assignment is `optimal_assignment`.
    """
    best_N, least = None, float("inf")
    for _ in range(starts):
        first = torch.randperm(len(features_NF), generator=generator)[:num_clusters]
        centre_EF = features_NF[first.to(features_NF.device)]
        expert_N = harden(-_squared_distance(features_NF, centre_EF))
        for _ in range(rounds):
            centre_EF = means(features_NF, expert_N, num_clusters)
            before_N = expert_N
            expert_N = harden(-_squared_distance(features_NF, centre_EF))
            if torch.equal(before_N, expert_N):
                break
        centre_EF = means(features_NF, expert_N, num_clusters)
        spread = float((features_NF - centre_EF[expert_N]).square().sum())
        if best_N is None or spread < least:
            best_N, least = expert_N, spread
    assert best_N is not None
    if not is_exact:
        return best_N
    return optimal_assignment(
        _squared_distance(features_NF, means(features_NF, best_N, num_clusters))
    )


def means(
    features_NF: Float[Tensor, "N F"], expert_N: Int[Tensor, " N"], num_clusters: int
) -> Float[Tensor, "E F"]:
    """Mean of the features of each cluster's items."""
    sums_EF = features_NF.new_zeros(num_clusters, features_NF.shape[1])
    sums_EF.index_add_(0, expert_N, features_NF)
    return sums_EF * (num_clusters / len(features_NF))


def _squared_distance(features_NF: Tensor, centre_EF: Tensor) -> Tensor:
    """Squared distances less each item's own norm, which no assignment can change."""
    return centre_EF.square().sum(dim=1) - 2 * features_NF @ centre_EF.T
