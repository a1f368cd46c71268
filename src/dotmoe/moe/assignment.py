"""Neuron-to-expert assignment: soft plan by the configured solver, rounding, and what is learned.

Each rank solves its own layers alone.
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
from dotmoe.granularity import Granularity, joined, parts_of
from dotmoe.layout import ALWAYS_ON, ExpertLayout, in_file
from dotmoe.models.family import TARGETS
from dotmoe.options import above, at_least
from dotmoe.transport import Capacity, TransportPlan, balanced_plan, greedy_assignment, sinkhorn

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
        """Temperature of a step: linear over the warm-up, then constant.

        The paper's Temperature Annealing (app:log_domain_sinkhorn).
        """
        if step >= warmup_steps:
            return self.tau_end
        return self.tau_start + (self.tau_end - self.tau_start) * (step / warmup_steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignState:
    """What the alignment phase learns, always float32."""

    affinity_LNE: Float[Tensor, "L N F"]
    """Score of unit n for expert e in each layer (A; "assignment logits" in the paper), and where
    there is a shared expert its score for that in a last column."""
    router_LED: Float[Tensor, "L E D"]
    """Router rows."""
    step: int
    """Optimizer steps taken; 0 for an initial state."""
    target: str = "ffn"
    """What is split."""
    beside: "AlignState | None" = None
    """That of attention, where FFNs are not all."""

    def save(self, path: Path) -> None:
        """Write as one safetensors file."""
        tensors = {}
        for part in parts_of(self):
            learned = {"affinity": part.affinity_LNE, "router": part.router_LED}
            for name, tensor in learned.items():
                tensors[in_file(part.target, name)] = tensor.cpu().contiguous()
        save_file(tensors, path, metadata={"format": "dotmoe-state-1", "step": str(self.step)})

    @classmethod
    def load(cls, path: Path, device: torch.device) -> "AlignState":
        """Read a file written by `save`; a `UserError` says what is wrong with it."""
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                step = int((file.metadata() or {})["step"])
                return joined(
                    cls(
                        affinity_LNE=file.get_tensor(in_file(name, "affinity")),
                        router_LED=file.get_tensor(in_file(name, "router")),
                        step=step,
                        target=name,
                    )
                    for name in TARGETS
                    if in_file(name, "router") in file.keys()  # noqa: SIM118
                )
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise UserError(
                f"{path} cannot be read as an alignment state ({error}). Delete its folder's "
                "finish marker to run that stage again."
            ) from error


def soft_plan(
    affinity_LNE: Float[Tensor, "L N E"],
    capacity: Capacity,
    config: AssignmentConfig,
    *,
    tau: float,
    start_LE: Float[Tensor, "L E"] | None = None,
) -> TransportPlan:
    """Balanced soft plan of every layer, of which there may be none (eq:entropic_ot).

    `capacity` is the split's. `start_LE` has column potentials of an earlier plan: a warm start,
    `newton` only. Gradient: to the affinities, implicit for `newton`, unrolled for `sinkhorn`.
    """
    if config.solver == "sinkhorn":
        sweeps = config.sinkhorn_sweeps
        return sinkhorn(affinity_LNE, capacity=capacity, tau=tau, num_sweeps=sweeps)
    return balanced_plan(affinity_LNE, capacity=capacity, tau=tau, start=start_LE)


def hard_assignment(plan: TransportPlan, capacity: Capacity) -> Int[Tensor, "L N"]:
    """Expert of each neuron by greedy rounding, E for the shared one; exactly balanced."""
    return greedy_assignment(plan.plan.detach(), capacity=capacity)


@torch.no_grad()
def extract(state: AlignState, split: Granularity, config: AssignmentConfig) -> ExpertLayout:
    """STAGE extract: round the plan at the final temperature to the layout that is exported.

    Router rows are centred over experts first: that changes no routing, and keeps the gates of the
    exported architecture closest to 1.

    Args:
        state: Affinities and routers.
        split: Gives k, the size of the shared expert, and the leading layers that stay dense: all
            their neurons are always on.
        config: Solver and final temperature.
    """
    if split.beside:
        pairs = zip(parts_of(state), parts_of(split), strict=True)
        return joined(extract(part, of_part, config) for part, of_part in pairs)
    plan = soft_plan(state.affinity_LNE, split.capacity, config, tau=config.tau_end)
    centred_LED = state.router_LED - state.router_LED.mean(dim=1, keepdim=True)
    expert_of_neuron_LN = hard_assignment(plan, split.capacity).cpu()
    expert_of_neuron_LN[expert_of_neuron_LN == split.num_experts] = ALWAYS_ON
    expert_of_neuron_LN[: split.first_dense_layers] = ALWAYS_ON
    return ExpertLayout(
        expert_of_neuron_LN=expert_of_neuron_LN,
        router_LED=centred_LED.cpu(),
        active_experts=split.active_experts,
        target=split.target,
    )


class Assignment:
    """Affinities and routers as they are trained, and the plans they give, in all split layers.

    Among several ranks they are DTensors, each rank with its layers, of which there may be none.
    """

    def __init__(
        self,
        affinity_LNE: Float[Tensor, "L N F"],
        router_LED: Float[Tensor, "L E D"],
        capacity: Capacity,
        config: AssignmentConfig,
        ranks: DeviceMesh | None,
        *,
        is_learned: bool,
    ) -> None:
        """Copy the start, which is equal on all ranks."""
        self.capacity = capacity
        self.config = config
        self.ranks = ranks
        self.affinity_LNE = nn.Parameter(
            divided(affinity_LNE.float(), ranks), requires_grad=is_learned
        )
        self.router_LED = nn.Parameter(divided(router_LED.float(), ranks))
        self.potential_LE = divided(affinity_LNE.new_zeros(affinity_LNE.shape[::2]).double(), ranks)
        """Where the solver starts next: column potentials in units of affinity, where a change of
        temperature hardly moves them."""

    def plan(self, tau: float) -> TransportPlan:
        """Soft plan of this rank's layers."""
        start_lE = local_part(self.potential_LE) / tau
        affinity_lNE = local_part(self.affinity_LNE)
        plan = soft_plan(affinity_lNE, self.capacity, self.config, tau=tau, start_LE=start_lE)
        self.potential_LE = self._divided(plan.potential.detach().double() * tau)
        return plan

    def rounded(self, plan: TransportPlan) -> Int[Tensor, "L N"]:
        """Hard assignment of all layers, the same on every rank."""
        return full_tensor(self._divided(hard_assignment(plan, self.capacity)))

    def quality(self, plan: TransportPlan, expert_of_neuron_LN: Tensor) -> dict[str, Tensor]:
        """`marginal_error` and `soft_hard_gap` over all layers, the same on every rank.

        The gap is the mean over neurons of 1 - the plan's entry for the assigned expert: half the
        mean L1 distance of soft and hard rows (eq:assignment_ste).
        """
        own_lN1 = expert_of_neuron_LN[own_rows(self.affinity_LNE)].unsqueeze(-1)
        chosen_lN = plan.plan.detach().gather(-1, own_lN1).squeeze(-1)
        return {
            "marginal_error": full_tensor(self._divided(plan.marginal_error.double())).max(),
            "soft_hard_gap": 1 - full_tensor(self._divided(chosen_lN.mean(dim=1))).mean(),
        }

    def backward_plan(self, plan: TransportPlan, gradient_LNE: Tensor) -> None:
        """Sum the gradient of this rank's tokens over ranks, and go back through the own plan."""
        torch.autograd.backward(plan.plan, summed_rows(gradient_LNE, self.ranks))

    def backward_routers(self, gradient_LED: Tensor) -> None:
        """The same for the routers."""
        own = summed_rows(gradient_LED, self.ranks)
        torch.autograd.backward(local_part(self.router_LED), own)

    def _divided(self, part: Tensor) -> Tensor:
        return as_divided(part, len(self.affinity_LNE), self.ranks)
