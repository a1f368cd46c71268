"""Affinities and routers as the ranks hold them: each its own layers, and solves those alone."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dotmoe.artifacts import AlignState
from dotmoe.distributed import Division
from dotmoe.moe.assignment import AssignmentConfig, hard_assignment, soft_plan
from dotmoe.training.task import local_part
from dotmoe.transport import TransportPlan


class Learned:
    """What alignment trains. Among several ranks affinities and routers are DTensors, by layer."""

    def __init__(
        self,
        start: AlignState,
        config: AssignmentConfig,
        ranks: DeviceMesh | None,
        *,
        learn_assignment: bool,
    ) -> None:
        """Copy the start, of which all ranks have the whole."""
        self.config = config
        self.shape = start.affinity_LNE.shape
        self.division = division = Division(len(start.affinity_LNE), ranks)
        self.affinity_LNE = nn.Parameter(
            division.divided(start.affinity_LNE.float()), requires_grad=learn_assignment
        )
        self.router_LED = nn.Parameter(division.divided(start.router_LED.float()))
        self.potential_LE: Tensor | None = None
        """Where the solver starts next: column potentials in units of affinity, where a change of
        temperature hardly moves them. A DTensor as the affinities are."""

    def plan(self, tau: float) -> TransportPlan:
        """Soft plan of this rank's layers, of which there may be none."""
        affinity_lNE = local_part(self.affinity_LNE)
        if len(affinity_lNE):
            start = None if self.potential_LE is None else local_part(self.potential_LE) / tau
            plan = soft_plan(affinity_lNE, self.config, tau=tau, start_LE=start)
        else:
            nothing_lE = affinity_lNE.new_empty(0, self.shape[-1], dtype=torch.float64)
            plan = TransportPlan(affinity_lNE * 1.0, nothing_lE, nothing_lE[:, 0], num_passes=0)
        self.potential_LE = self.division.known(plan.potential.detach().double() * tau)
        return plan

    def rounded(self, plan: TransportPlan) -> Int[Tensor, "L N"]:
        """Hard assignment of all layers, the same on every rank."""
        own_lN = plan.plan.new_empty(plan.plan.shape[:2], dtype=torch.long)
        return self.division.gathered(hard_assignment(plan) if len(own_lN) else own_lN)

    def marginal_error(self, plan: TransportPlan) -> Tensor:
        """Largest of all layers, the same on every rank."""
        return self.division.gathered(plan.marginal_error.double()).max()

    def soft_hard_gap(self, plan: TransportPlan, expert_of_neuron_LN: Tensor) -> Tensor:
        """Mean over neurons of 1 - the plan's entry for the assigned expert, 0 to 1.

        How far the soft plan is from the hard assignment that the masks obey (eq:assignment_ste):
        half the mean L1 distance of their rows. The same on every rank.
        """
        own_lN1 = expert_of_neuron_LN[self.division.own].unsqueeze(-1)
        chosen_lN = plan.plan.detach().gather(-1, own_lN1).squeeze(-1)
        return 1 - self.division.gathered(chosen_lN.mean(dim=1)).mean()

    def receiver(self) -> Float[Tensor, "L N E"]:
        """Stands for the plan of all layers where only its gradient is wanted; takes no memory."""
        nothing = torch.zeros((), device=self.affinity_LNE.device)
        return nothing.expand(self.shape).requires_grad_()

    def routers(self) -> Float[Tensor, "L E D"]:
        """Router rows of all layers; a gradient on them is to be given to `pass_to_routers`."""
        return self.division.gathered(local_part(self.router_LED).detach()).requires_grad_()

    def pass_to_affinities(self, plan: TransportPlan, gradient_LNE: Tensor) -> None:
        """Sum a gradient of the plan of all layers over ranks, and go back through the own plan.

        Args:
            plan: Made by `plan`.
            gradient_LNE: Of this rank's tokens; used up.
        """
        torch.autograd.backward(plan.plan, self.division.summed(gradient_LNE))

    def pass_to_routers(self, gradient_LED: Tensor) -> None:
        """The same for the routers."""
        own = self.division.summed(gradient_LED)
        torch.autograd.backward(local_part(self.router_LED), own)
