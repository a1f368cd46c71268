"""Neuron-to-expert assignment of all layers: soft plan by the configured solver, then rounding."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor

from dotmoe.transport import TransportPlan, balanced_plan, greedy_assignment, sinkhorn, temperature

Solver = Literal["newton", "sinkhorn"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AssignmentConfig:
    """How affinities become experts."""

    tau_start: float = 1.0
    """Transport temperature at the first step, in units of affinity (paper: 1.0)."""
    tau_end: float = 0.1
    """Transport temperature after the warm-up, and of every extraction (paper: 0.1)."""
    solver: Solver = "newton"
    """`newton`: semi-dual Newton with implicit gradient, to convergence. `sinkhorn`: the paper's
    unrolled sweeps."""
    sinkhorn_sweeps: int = 50
    """Sweeps of the `sinkhorn` solver (paper: 50)."""

    def tau(self, step: int, warmup_steps: int) -> float:
        """Temperature of an optimizer step."""
        return temperature(step, start=self.tau_start, end=self.tau_end, warmup_steps=warmup_steps)


def soft_plan(
    affinity_LNE: Float[Tensor, "L N E"],
    config: AssignmentConfig,
    *,
    tau: float,
    start_LE: Float[Tensor, "L E"] | None = None,
) -> TransportPlan:
    """Balanced soft plan of every layer (eq:entropic_ot).

    Args:
        affinity_LNE: Affinities A, float32.
        config: Which solver.
        tau: Temperature.
        start_LE: Column potentials of an earlier plan; a warm start, `newton` only.

    Gradient: to the affinities, implicit for `newton`, unrolled for `sinkhorn`.
    """
    capacity = affinity_LNE.shape[1] // affinity_LNE.shape[2]
    if config.solver == "sinkhorn":
        sweeps = config.sinkhorn_sweeps
        return sinkhorn(affinity_LNE, capacity=capacity, tau=tau, num_sweeps=sweeps)
    return balanced_plan(affinity_LNE, capacity=capacity, tau=tau, start=start_LE)


def hard_assignment(plan: TransportPlan) -> Int[Tensor, "L N"]:
    """Expert of each neuron by greedy rounding; exactly balanced."""
    num_neurons, num_experts = plan.plan.shape[-2:]
    return greedy_assignment(plan.plan.detach(), capacity=num_neurons // num_experts)
