"""The ways to assign neurons that `assignment.py` compares, each as one alignment step needs it."""

import math
from typing import Protocol

import torch
from torch import Tensor

from dotmoe.transport import TransportPlan, balanced_plan, greedy_assignment


class Method(Protocol):
    """Soft plan and hard assignment of one layer."""

    def plan(self, affinity_NE: Tensor, tau: float) -> Tensor:
        """Balanced soft plan with a gradient to the affinities."""
        ...

    def rounded(self, plan_NE: Tensor) -> Tensor:
        """Expert of each neuron."""
        ...


class Paper:
    """The paper's recipe, written out without anything of this package."""

    def plan(self, affinity_NE: Tensor, tau: float, num_sweeps: int = 50) -> Tensor:
        """Unrolled sweeps of alg:sinkhorn; the gradient is autograd's."""
        num_neurons, num_experts = affinity_NE.shape
        logits_NE = affinity_NE / tau
        log_capacity = math.log(num_neurons // num_experts)
        v_E = torch.full((num_experts,), log_capacity, dtype=affinity_NE.dtype)
        for _ in range(num_sweeps):
            u_N1 = -torch.logsumexp(logits_NE + v_E, dim=1, keepdim=True)
            v_E = log_capacity - torch.logsumexp(logits_NE + u_N1, dim=0)
        return torch.exp(logits_NE + u_N1 + v_E)

    def rounded(self, plan_NE: Tensor) -> Tensor:
        """Serial greedy selection on the CPU: all entries, largest first."""
        num_neurons, num_experts = plan_NE.shape
        order = torch.argsort(plan_NE.flatten(), descending=True, stable=True).tolist()
        expert_of = [-1] * num_neurons
        room = [num_neurons // num_experts] * num_experts
        left = num_neurons
        for entry in order:
            neuron, expert = divmod(entry, num_experts)
            if expert_of[neuron] < 0 and room[expert]:
                expert_of[neuron] = expert
                room[expert] -= 1
                left -= 1
                if left == 0:
                    break
        return torch.tensor(expert_of)


class PythonOptimalTransport(Paper):
    """POT's log-domain solver on torch tensors; POT has no rounding, so the paper's."""

    def plan(self, affinity_NE: Tensor, tau: float, num_sweeps: int = 50) -> Tensor:
        """As many sweeps as the paper's; the gradient is autograd's."""
        import ot  # optional

        num_neurons, num_experts = affinity_NE.shape
        plan_NE: Tensor = ot.bregman.sinkhorn_log(
            affinity_NE.new_ones(num_neurons),
            affinity_NE.new_full((num_experts,), num_neurons / num_experts),
            -affinity_NE,
            reg=tau,
            numItermax=num_sweeps,
            stopThr=0.0,
            warn=False,
        )
        return plan_NE


class Newton:
    """This package: semi-dual Newton with implicit gradient, rounding by deferred acceptance."""

    def __init__(self) -> None:
        self.start_E: Tensor | None = None
        """Column potential of the step before, in units of affinity."""
        self.num_passes = 0

    def remember(self, affinity_NE: Tensor, tau: float) -> None:
        """Start from the potential of these affinities from now on, as alignment does."""
        self.start_E = tau * self._solved(affinity_NE, tau).potential

    def plan(self, affinity_NE: Tensor, tau: float) -> Tensor:
        """To the solver's default tolerance; the gradient is implicit."""
        solved = self._solved(affinity_NE, tau)
        self.num_passes = solved.num_passes
        return solved.plan

    def rounded(self, plan_NE: Tensor) -> Tensor:
        """Equal to the serial selection."""
        return greedy_assignment(plan_NE, capacity=plan_NE.shape[0] // plan_NE.shape[1])

    def _solved(self, affinity_NE: Tensor, tau: float) -> TransportPlan:
        start_E = None if self.start_E is None else self.start_E / tau
        capacity = affinity_NE.shape[0] // affinity_NE.shape[1]
        return balanced_plan(affinity_NE, capacity=capacity, tau=tau, start=start_E)


METHODS: dict[str, type[Paper] | type[Newton]] = {
    "paper": Paper,
    "POT": PythonOptimalTransport,
    "dotmoe, cold": Newton,
    "dotmoe": Newton,
}
"""`dotmoe` starts from the potential of the step before."""
