"""What every transport solver returns, and what every one of them refuses."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


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


def column_sums(plan: Float[Tensor, "*L N E"], capacity: int) -> Float[Tensor, "*L E"]:
    """Column sums in float64, at the speed of float32 ones.

    Runs of `capacity` rows are added in the plan's own dtype, the E partial sums in float64: the
    error stays near one rounding, and no float64 copy of the plan is made.
    """
    *leading, num_neurons, num_experts = plan.shape
    runs = plan.reshape(*leading, num_neurons // capacity, capacity, num_experts)
    return runs.sum(dim=-2).sum(dim=-2, dtype=torch.float64)


def check_affinity(
    affinity: Float[Tensor, "*L N E"], *, capacity: int, tau: float
) -> tuple[Float[Tensor, "*L"], Float[Tensor, "*L"]]:
    """Refuse what no solver can transport.

    Returns:
        Lowest and highest affinity of each problem.

    Raises:
        ValueError: N is not capacity * E, tau is not positive, the dtype is below float32, or an
            affinity is NaN or infinite.
    """
    num_neurons, num_experts = affinity.shape[-2:]
    if capacity < 1 or num_neurons != capacity * num_experts:
        raise ValueError(
            f"{num_neurons} neurons do not fill {num_experts} experts of {capacity}: "
            "N must be capacity * E."
        )
    if not tau > 0:
        raise ValueError(f"tau is {tau}, but a temperature must be above 0.")
    if affinity.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"affinity is {affinity.dtype}; transport needs float32 or float64.")
    # NaN anywhere becomes both extremes: no mask as large as the affinities. One layer at a time,
    # because `aminmax` is slow along a dimension.
    problems = affinity.detach().reshape(-1, num_neurons, num_experts)
    extremes = torch.stack([torch.stack(torch.aminmax(problem)) for problem in problems])
    if not bool(torch.isfinite(extremes).all()):
        raise ValueError("affinity contains NaN or infinity; no plan exists.")
    low, high = extremes.reshape(*affinity.shape[:-2], 2).unbind(-1)
    return low, high
