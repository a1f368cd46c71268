"""What every transport solver returns, and what every one of them refuses."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

Capacity = int | Sequence[int] | Int[Tensor, " E"]
"""Neurons of every expert (s), or of each; they sum to N."""

CACHED_ELEMENTS = 2**17
"""Elements of a block on the CPU: half a MiB in float32, so that a few of them share a cache."""


@dataclass(frozen=True)
class TransportPlan:
    """A soft balanced assignment of N neurons to E experts, one per leading index."""

    plan: Float[Tensor, "*L N E"]
    """Entries in [0, 1]; rows sum to 1, columns to the capacity. Carries the gradient."""
    potential: Float[Tensor, "*L E"]
    """Column log-potential v with plan = softmax_e(A / tau + v); detached, float64 from Newton."""
    marginal_error: Float[Tensor, "*L"]
    """Largest |column sum - capacity| / capacity (and row error, for Sinkhorn) of `plan`."""
    num_passes: int
    """Times the solver went over all N x E entries."""


def row_blocks(plan_NE: Float[Tensor, "N E"]) -> list[slice]:
    """Neurons of consecutive parts of a plan, for several operations to pass over each.

    On the CPU a temporary as large as a plan costs more in page faults than the arithmetic on it.
    Other devices get everything as one part.
    """
    num_neurons, num_experts = plan_NE.shape
    rows = max(1, CACHED_ELEMENTS * torch.get_num_threads() // num_experts)
    if plan_NE.device.type != "cpu":
        rows = num_neurons
    return [slice(first, first + rows) for first in range(0, num_neurons, rows)]


def checked_capacity(scores: Float[Tensor, "*L N E"], capacity: Capacity) -> Int[Tensor, " E"]:
    """Capacity of each expert, on the device of the scores; there may be no leading index.

    Raises:
        ValueError: The capacities do not sum to N, one is below 1, or a score is NaN or infinite.
    """
    num_neurons, num_experts = scores.shape[-2:]
    capacity_E = torch.as_tensor(capacity, device=scores.device).expand(num_experts)
    if int(capacity_E.min()) < 1 or int(capacity_E.sum()) != num_neurons:
        raise ValueError(
            f"{num_neurons} neurons do not fill {num_experts} experts of {capacity}: "
            "N must be the sum of the capacities."
        )
    # NaN anywhere becomes both extremes: one pass, and no mask as large as the scores.
    extremes = scores.detach().aminmax() if scores.numel() else ()
    if not all(bool(extreme.isfinite()) for extreme in extremes):
        raise ValueError("scores contain NaN or infinity, so that no assignment exists.")
    return capacity_E


def checked_problem(
    affinity: Float[Tensor, "*L N E"], capacity: Capacity, tau: float
) -> Int[Tensor, " E"]:
    """`checked_capacity` of affinities, which must be float32 or float64; tau must be positive."""
    if not tau > 0:
        raise ValueError(f"tau is {tau}, but a temperature must be above 0.")
    if affinity.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"affinity is {affinity.dtype}; transport needs float32 or float64.")
    return checked_capacity(affinity, capacity)
