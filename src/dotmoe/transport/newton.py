"""Balanced plans by Newton's method on the semi-dual: a few passes, not a hundred sweeps."""

import torch
from jaxtyping import Float
from torch import Tensor

from dotmoe.transport.implicit_gradient import attach_gradient
from dotmoe.transport.plan import TransportPlan, check_affinity
from dotmoe.transport.semi_dual import SemiDual


def balanced_plan(
    affinity: Float[Tensor, "*L N E"],
    *,
    capacity: int,
    tau: float,
    start: Float[Tensor, "*L E"] | None = None,
    tolerance: float = 1e-6,
    max_passes: int = 300,
) -> TransportPlan:
    """Soft balanced assignment of N neurons to E experts, solved to a stated accuracy.

    The plan of eq:entropic_ot, as alg:sinkhorn would give it after enough sweeps. Row potentials
    are eliminated: M = softmax_e(A / tau + v), and v maximises the concave

        F(v) = s * sum_e v_e - sum_n logsumexp_e(A_ne / tau + v_e)

    All leading indices are solved together, each with its own step size and its own temperature
    on the way to `tau`.

    Args:
        affinity: Score A of neuron n for expert e, larger is closer. float32 or float64.
        capacity: Neurons in one expert (s); capacity * E must equal N.
        tau: Temperature > 0, in units of affinity. Small is sharp.
        start: `potential` of a previous plan for nearby affinities, or None. Only saves passes.
        tolerance: Largest |column sum - s| / s to stop at. Below the rounding of the dtype (about
            1e-7 in float32) the solver stops where it no longer improves.
        max_passes: Upper bound on passes over A, at least 1. A start that is near needs 2 to 4.

    Returns:
        The plan; `marginal_error` says what was reached, and exceeds `tolerance` only where
        rounding or `max_passes` stopped the solver. Rows sum to 1 to rounding. Never NaN.

    Raises:
        ValueError: As `check_affinity`; a non-finite `start`; max_passes below 1.

    Gradient:
        Implicit, see `attach_gradient`; first derivatives, with respect to `affinity` only.

    Example:
        >>> balanced_plan(torch.tensor([[9.0, 0], [9, 0]]), capacity=1, tau=1.0).plan
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
    """
    check_affinity(affinity, capacity=capacity, tau=tau)
    if max_passes < 1:
        raise ValueError(f"max_passes is {max_passes}, but at least 1 pass is needed.")
    *leading, num_neurons, num_experts = affinity.shape
    affinity_LNE = affinity.reshape(-1, num_neurons, num_experts)
    if start is None:
        start_LE = affinity_LNE.new_zeros(affinity_LNE.shape[0], num_experts, dtype=torch.float64)
    elif bool(torch.isfinite(start).all()):
        start_LE = start.detach().to(affinity.device, torch.float64).reshape(-1, num_experts)
    else:
        raise ValueError("start contains NaN or infinity; pass None to start afresh.")
    with torch.no_grad():
        problem = SemiDual(affinity_LNE.detach(), capacity, tau, tolerance)
        solution = problem.solve(start_LE, max_passes)
    plan_LNE = attach_gradient(affinity_LNE, solution.plan, tau)
    return TransportPlan(
        plan=plan_LNE.reshape(affinity.shape),
        potential=solution.potential.reshape(*leading, num_experts),
        marginal_error=solution.marginal_error.reshape(leading),
        num_passes=solution.num_passes,
    )
