"""Balanced plans by Newton's method on the semi-dual: a few passes, not a hundred sweeps."""

import torch
from jaxtyping import Float
from torch import Tensor

from dotmoe.transport.blocks import layer_groups
from dotmoe.transport.implicit_gradient import attach_gradient
from dotmoe.transport.laplacian import FactoredLaplacian
from dotmoe.transport.newton_state import Solution
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
        max_passes: Upper bound on passes over all N x E entries, at least 1. A start that is near
            needs 2 to 4.

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
    low, high = check_affinity(affinity, capacity=capacity, tau=tau)
    if max_passes < 1:
        raise ValueError(f"max_passes is {max_passes}, but at least 1 pass is needed.")
    if start is not None and not bool(torch.isfinite(start).all()):
        raise ValueError("start contains NaN or infinity; pass None to start afresh.")
    *leading, num_neurons, num_experts = affinity.shape
    affinity_LNE = affinity.reshape(-1, num_neurons, num_experts)
    zero_LE = affinity_LNE.new_zeros(len(affinity_LNE), num_experts, dtype=torch.float64)
    solution = Solution(
        plan_LNE=torch.empty_like(affinity_LNE, memory_format=torch.contiguous_format),
        potential_LE=zero_LE.clone(),
        error_L=zero_LE.new_empty(len(zero_LE)),
        hessian=FactoredLaplacian(factor_LEE=torch.diag_embed(zero_LE), scale_LE=zero_LE),
    )
    if start is not None:
        solution.potential_LE.copy_(start.detach().reshape(-1, num_experts))
    num_passes = 0
    with torch.no_grad():
        for group in layer_groups(affinity_LNE.shape, affinity.device):
            problem = SemiDual(
                affinity_LNE[group].detach(),
                low.reshape(-1)[group],
                high.reshape(-1)[group],
                capacity=capacity,
                tau=tau,
                tolerance=tolerance,
            )
            num_passes = max(num_passes, problem.solve(solution.part(group), max_passes))
    plan_LNE = attach_gradient(affinity_LNE, solution.plan_LNE, tau, solution.hessian)
    return TransportPlan(
        plan=plan_LNE.reshape(affinity.shape),
        potential=solution.potential_LE.reshape(*leading, num_experts),
        marginal_error=solution.error_L.reshape(leading),
        num_passes=num_passes,
    )
