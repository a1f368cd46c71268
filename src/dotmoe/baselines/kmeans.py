"""Balanced clusters: k-means with clusters of one size, and the exact assignment that ends it."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dotmoe.calibrate import harden
from dotmoe.errors import UserError


def optimal_assignment(cost_NE: Float[Tensor, "N E"]) -> Int[Tensor, " N"]:
    """Assignment of N items to E experts, N / E each, whose summed cost no other undercuts.

    The rivals assign exactly, by Jonker-Volgenant on a square matrix with every expert's column
    repeated, or by minimum-cost flow; this is POT's network simplex, with the same optimum.

    Args:
        cost_NE: Cost of item n in expert e, finite; N must be a multiple of E.

    Returns:
        Expert of each item, on the device of the costs.

    Raises:
        UserError: POT is not installed.
    """
    try:
        import ot  # optional
    except ImportError as error:
        raise UserError(
            "This method assigns neurons exactly, which needs POT. Install it by "
            "pip install 'dotmoe[baselines]'."
        ) from error
    num_items, num_experts = cost_NE.shape
    room_E = torch.full((num_experts,), float(num_items // num_experts), dtype=torch.float64)
    # Integer supplies and demands have an integer optimum, which the simplex method returns.
    flow_NE = ot.emd(
        torch.ones(num_items, dtype=torch.float64).numpy(),
        room_E.numpy(),
        cost_NE.double().cpu().numpy(),
        numItermax=100_000_000,
    )
    return torch.from_numpy(flow_NE).argmax(dim=1).to(cost_NE.device)


def balanced_kmeans(
    features_NF: Float[Tensor, "N F"],
    num_clusters: int,
    *,
    rounds: int,
    starts: int,
    generator: torch.Generator,
) -> Int[Tensor, " N"]:
    """Clusters of equal size with small squared distances to their centres.

    The balanced assignment of each round is our transport solver's.

    Args:
        features_NF: What is clustered, float32; N must be a multiple of the number of clusters.
        num_clusters: E.
        rounds: Rounds at most of each start; fewer where nothing moves any more.
        starts: Random starts; that with the smallest distances is kept.
        generator: Picks the first centres among the items.
    """

    def clustered() -> tuple[float, Tensor]:
        first = torch.randperm(len(features_NF), generator=generator)[:num_clusters]
        centre_EF = features_NF[first.to(features_NF.device)]
        expert_N = harden(-squared_distance(features_NF, centre_EF))
        for _ in range(rounds):
            before_N, centre_EF = expert_N, means(features_NF, expert_N, num_clusters)
            expert_N = harden(-squared_distance(features_NF, centre_EF))
            if torch.equal(before_N, expert_N):
                break
        centre_EF = means(features_NF, expert_N, num_clusters)
        return float((features_NF - centre_EF[expert_N]).square().sum()), expert_N

    _, best_N = min((clustered() for _ in range(starts)), key=lambda found: found[0])
    return best_N


def means(
    features_NF: Float[Tensor, "N F"], expert_N: Int[Tensor, " N"], num_clusters: int
) -> Float[Tensor, "E F"]:
    """Mean of the features of each cluster's items; clusters are of one size."""
    sums_EF = features_NF.new_zeros(num_clusters, features_NF.shape[1])
    sums_EF.index_add_(0, expert_N, features_NF)
    return sums_EF * (num_clusters / len(features_NF))


def squared_distance(features_NF: Tensor, centre_EF: Tensor) -> Tensor:
    """Squared distances less each item's own norm, which no assignment can change."""
    return centre_EF.square().sum(dim=1) - 2 * features_NF @ centre_EF.T
