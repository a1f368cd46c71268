"""Neuron-to-expert assignment: soft plan by the configured solver, rounding, and what is learned.

Affinities and routers are divided over the ranks by layer: each rank solves its own layers alone.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dotmoe.distributed import (
    as_divided,
    divided,
    full_tensor,
    local_part,
    own_rows,
    summed_rows,
)
from dotmoe.errors import UserError
from dotmoe.options import above, at_least
from dotmoe.transport import TransportPlan, balanced_plan, greedy_assignment, sinkhorn

Solver = Literal["newton", "sinkhorn"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AssignmentConfig:
    """How affinities become experts."""

    tau_start: Annotated[float, above(0)] = 1.0
    """Transport temperature at the first step, in units of affinity (paper: 1.0)."""
    tau_end: Annotated[float, above(0)] = 0.1
    """Transport temperature after the warm-up, and of every extraction (paper: 0.1)."""
    solver: Solver = "newton"
    """`newton`: semi-dual Newton with implicit gradient, to convergence. `sinkhorn`: the paper's
    unrolled sweeps."""
    sinkhorn_sweeps: Annotated[int, at_least(1)] = 50
    """Sweeps of the `sinkhorn` solver (paper: 50)."""

    def tau(self, step: int, warmup_steps: int) -> float:
        """Temperature of an optimizer step: linear over the warm-up, then constant.

            tau(t) = tau_start + (tau_end - tau_start) * min(t / warmup_steps, 1)

        As in the paper (app:log_domain_sinkhorn, paragraph Temperature Annealing).
        """
        if step >= warmup_steps:
            return self.tau_end
        return self.tau_start + (self.tau_end - self.tau_start) * (step / warmup_steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignState:
    """What the alignment phase learns, always float32."""

    affinity_LNE: Float[Tensor, "L N E"]
    """Score of neuron n for expert e in each layer (A; "assignment logits" in the paper)."""
    router_LED: Float[Tensor, "L E D"]
    """Router rows."""
    step: int
    """Optimizer steps taken; 0 for an initial state."""

    def save(self, path: Path) -> None:
        """Write as one safetensors file."""
        tensors = {
            "affinity": self.affinity_LNE.cpu().contiguous(),
            "router": self.router_LED.cpu().contiguous(),
        }
        save_file(tensors, path, metadata={"format": "dotmoe-state-1", "step": str(self.step)})

    @classmethod
    def load(cls, path: Path, device: torch.device) -> "AlignState":
        """Read a file written by `save`.

        Raises:
            UserError: The file is missing, truncated or not a state.
        """
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                metadata = file.metadata() or {}
                return cls(
                    affinity_LNE=file.get_tensor("affinity"),
                    router_LED=file.get_tensor("router"),
                    step=int(metadata["step"]),
                )
        except (OSError, SafetensorError, KeyError) as error:
            raise UserError(
                f"{path} cannot be read as an alignment state ({error}). Delete its folder's "
                "finish marker to run that stage again."
            ) from error


def soft_plan(
    affinity_LNE: Float[Tensor, "L N E"],
    config: AssignmentConfig,
    *,
    tau: float,
    start_LE: Float[Tensor, "L E"] | None = None,
) -> TransportPlan:
    """Balanced soft plan of every layer (eq:entropic_ot).

    Args:
        affinity_LNE: Affinities A, float32; there may be no layer.
        config: Which solver.
        tau: Temperature.
        start_LE: Column potentials of an earlier plan; a warm start, `newton` only.

    Gradient: to the affinities, implicit for `newton`, unrolled for `sinkhorn`.
    """
    num_layers, num_neurons, num_experts = affinity_LNE.shape
    if not num_layers:
        nothing_LE = affinity_LNE.new_empty(0, num_experts, dtype=torch.float64)
        return TransportPlan(affinity_LNE * 1.0, nothing_LE, nothing_LE[:, 0], num_passes=0)
    capacity = num_neurons // num_experts
    if config.solver == "sinkhorn":
        sweeps = config.sinkhorn_sweeps
        return sinkhorn(affinity_LNE, capacity=capacity, tau=tau, num_sweeps=sweeps)
    return balanced_plan(affinity_LNE, capacity=capacity, tau=tau, start=start_LE)


def hard_assignment(plan: TransportPlan) -> Int[Tensor, "L N"]:
    """Expert of each neuron by greedy rounding; exactly balanced."""
    num_layers, num_neurons, num_experts = plan.plan.shape
    if not num_layers:
        return plan.plan.new_empty(0, num_neurons, dtype=torch.long)
    return greedy_assignment(plan.plan.detach(), capacity=num_neurons // num_experts)


class Assignment:
    """Affinities and routers as they are trained, and the plans they give, in all split layers."""

    def __init__(
        self,
        affinity_LNE: Float[Tensor, "L N E"],
        router_LED: Float[Tensor, "L E D"],
        config: AssignmentConfig,
        ranks: DeviceMesh | None,
        *,
        is_learned: bool,
    ) -> None:
        """Copy the start, which is equal on all ranks."""
        self.config = config
        self.ranks = ranks
        self.shape = affinity_LNE.shape
        self.affinity_LNE = nn.Parameter(
            divided(affinity_LNE.float(), ranks), requires_grad=is_learned
        )
        """Among several ranks a DTensor, as are routers and potential."""
        self.router_LED = nn.Parameter(divided(router_LED.float(), ranks))
        self.potential_LE = divided(affinity_LNE.new_zeros(affinity_LNE.shape[::2]).double(), ranks)
        """Where the solver starts next: column potentials in units of affinity, where a change of
        temperature hardly moves them."""

    def plan(self, tau: float) -> TransportPlan:
        """Soft plan of this rank's layers, of which there may be none."""
        start_lE = local_part(self.potential_LE) / tau
        plan = soft_plan(local_part(self.affinity_LNE), self.config, tau=tau, start_LE=start_lE)
        self.potential_LE = self._divided(plan.potential.detach().double() * tau)
        return plan

    def rounded(self, plan: TransportPlan) -> Int[Tensor, "L N"]:
        """Hard assignment of all layers, the same on every rank."""
        return full_tensor(self._divided(hard_assignment(plan)))

    def marginal_error(self, plan: TransportPlan) -> Tensor:
        """Largest of all layers, the same on every rank."""
        return full_tensor(self._divided(plan.marginal_error.double())).max()

    def soft_hard_gap(self, plan: TransportPlan, expert_of_neuron_LN: Tensor) -> Tensor:
        """Mean over neurons of 1 - the plan's entry for the assigned expert, 0 to 1.

        How far the soft plan is from the hard assignment that the masks obey (eq:assignment_ste):
        half the mean L1 distance of their rows. The same on every rank.
        """
        own_lN1 = expert_of_neuron_LN[own_rows(self.affinity_LNE)].unsqueeze(-1)
        chosen_lN = plan.plan.detach().gather(-1, own_lN1).squeeze(-1)
        return 1 - full_tensor(self._divided(chosen_lN.mean(dim=1))).mean()

    def gradient_buffer(self) -> Float[Tensor, "L N E"]:
        """Stands for the plan of all layers where only its gradient is wanted; takes no memory."""
        nothing = torch.zeros((), device=self.affinity_LNE.device)
        return nothing.expand(self.shape).requires_grad_()

    def routers(self) -> Float[Tensor, "L E D"]:
        """Router rows of all layers; a gradient on them is to be given to `backward_routers`."""
        return full_tensor(self.router_LED.detach()).detach().requires_grad_()

    def backward_plan(self, plan: TransportPlan, gradient_LNE: Tensor) -> None:
        """Sum a gradient of the plan of all layers over ranks, and go back through the own plan.

        Args:
            plan: Made by `plan`.
            gradient_LNE: Of this rank's tokens.
        """
        torch.autograd.backward(plan.plan, summed_rows(gradient_LNE, self.ranks))

    def backward_routers(self, gradient_LED: Tensor) -> None:
        """The same for the routers."""
        own = summed_rows(gradient_LED, self.ranks)
        torch.autograd.backward(local_part(self.router_LED), own)

    def _divided(self, part: Tensor) -> Tensor:
        return as_divided(part, self.shape[0], self.ranks)
