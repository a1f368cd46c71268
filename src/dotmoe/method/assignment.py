"""Which expert a neuron goes to: affinities, a soft plan by a solver, and its rounding.

This is the one place where neurons are assigned. The start from data, each step of an alignment and
the extraction all call it with the same options, so that a new solver or rounding is one function
here and its name in `AssignmentConfig`.
"""

from collections.abc import Callable

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
    return SOLVERS[config.solver](affinity_LNE, capacity, tau, start_LE, tolerance)


def rounded(
    config: AssignmentConfig, plan_LNE: Float[Tensor, "*L N E"], capacity: Capacity
) -> Int[Tensor, "*L N"]:
    """Hard assignment M of a plan, or of other scores; every expert is exactly full.

    All solvers round alike: `config` is for one that would not.
    """
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
        return rounded(config, affinity_NE, capacity)
    plan = assignment_plan(config, affinity_NE, capacity, tau, tolerance=START_TOLERANCE)
    return rounded(config, plan.plan, capacity)


def _by_newton(
    affinity: Tensor, capacity: Capacity, tau: float, start: Tensor | None, tolerance: float
) -> TransportPlan:
    return balanced_plan(affinity, capacity=capacity, tau=tau, start=start, tolerance=tolerance)


def _by_sinkhorn(
    affinity: Tensor, capacity: Capacity, tau: float, start: Tensor | None, tolerance: float
) -> TransportPlan:
    return sinkhorn(affinity, capacity=capacity, tau=tau)


Solver = Callable[[Tensor, Capacity, float, Tensor | None, float], TransportPlan]
"""Maps affinities, capacity, temperature, warm start and tolerance to a plan."""
SOLVERS: dict[str, Solver] = {"newton": _by_newton, "sinkhorn": _by_sinkhorn}
"""Solvers by the names of `AssignmentConfig.solver`."""
