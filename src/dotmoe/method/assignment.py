"""Which expert a neuron goes to: affinities, a soft plan by a solver, and its rounding.

This is the one place where neurons are assigned: the start from data, each step of an alignment and
the extraction all call it with the same options. A new solver is one more case of `assignment_plan`
and its name in `AssignmentConfig`.
"""

from jaxtyping import Float, Int
from torch import Tensor

from dotmoe.method.config import AssignmentConfig
from dotmoe.method.transport import (
    Capacity,
    TransportPlan,
    balanced_plan,
    greedy_assignment,
    sinkhorn,
)

PLAN_TOLERANCE = 1e-6
"""Largest relative error of a column of a plan, for solvers that iterate to an accuracy."""
START_TOLERANCE = 1e-3
"""The same where a plan is only rounded and needs no gradient."""


def assignment_plan(
    config: AssignmentConfig,
    affinity_LNE: Float[Tensor, "*L N E"],
    capacity: Capacity,
    tau: float,
    start_LE: Float[Tensor, "*L E"] | None = None,
    tolerance: float = PLAN_TOLERANCE,
) -> TransportPlan:
    """Balanced soft plan of every layer (eq:entropic_ot), by the solver of `config`.

    There may be no layers. `start_LE` holds column potentials of an earlier plan as a warm start;
    it and `tolerance` are for `newton` only. The gradient flows to the affinities: implicit for
    `newton`, unrolled for `sinkhorn`.
    """
    if config.solver == "sinkhorn":
        return sinkhorn(affinity_LNE, capacity=capacity, tau=tau)
    return balanced_plan(
        affinity_LNE, capacity=capacity, tau=tau, start=start_LE, tolerance=tolerance
    )


def rounded(plan_LNE: Float[Tensor, "*L N E"], capacity: Capacity) -> Int[Tensor, "*L N"]:
    """Hard assignment M of a plan, or of other scores; every expert is exactly full."""
    return greedy_assignment(plan_LNE, capacity=capacity)


def assigned(
    config: AssignmentConfig,
    affinity_NE: Float[Tensor, "N E"],
    capacity: Capacity,
    *,
    relative_tau: float = 0.1,
) -> Int[Tensor, " N"]:
    """Hard assignment from affinities of any scale, of which it needs no gradient.

    The temperature is `relative_tau` standard deviations of the affinities.
    """
    tau = float(affinity_NE.std()) * relative_tau
    if tau == 0:  # all are equal: any plan is as good as they are
        return rounded(affinity_NE, capacity)
    plan = assignment_plan(config, affinity_NE, capacity, tau, tolerance=START_TOLERANCE)
    return rounded(plan.entries, capacity)
