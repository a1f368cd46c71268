"""What alignment learns, its plans by the configured solver, and their rounding to a layout."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dotmoe.errors import UserError
from dotmoe.granularity import Granularity, joined, parts_of
from dotmoe.layout import ALWAYS_ON, ExpertLayout, in_file
from dotmoe.models.family import TARGETS
from dotmoe.options import above, at_least
from dotmoe.transport import Capacity, TransportPlan, balanced_plan, greedy_assignment, sinkhorn


@dataclass(frozen=True, kw_only=True, slots=True)
class AssignmentConfig:
    """How affinities become experts."""

    tau_start: Annotated[float, above(0)] = 1.0
    """Transport temperature at the first step, in units of affinity (paper: 1.0)."""
    tau_end: Annotated[float, above(0)] = 0.1
    """Transport temperature after the warm-up, and of every extraction (paper: 0.1)."""
    solver: Literal["newton", "sinkhorn"] = "newton"
    """`newton`: semi-dual Newton with implicit gradient, to convergence. `sinkhorn`: the paper's
    unrolled sweeps."""
    sinkhorn_sweeps: Annotated[int, at_least(1)] = 50
    """Sweeps of the `sinkhorn` solver (paper: 50)."""

    def tau(self, step: int, warmup_steps: int) -> float:
        """Of a step: linear over the warm-up, then constant (app:log_domain_sinkhorn)."""
        if step >= warmup_steps:
            return self.tau_end
        return self.tau_start + (self.tau_end - self.tau_start) * (step / warmup_steps)

    def solve(
        self,
        affinity_LNE: Float[Tensor, "L N E"],
        capacity: Capacity,
        tau: float,
        start_LE: Float[Tensor, "L E"] | None = None,
    ) -> TransportPlan:
        """Balanced soft plan of every layer, of which there may be none (eq:entropic_ot).

        `start_LE` has column potentials of an earlier plan: a warm start, `newton` only. Gradient:
        to the affinities, implicit for `newton`, unrolled for `sinkhorn`.
        """
        if self.solver == "sinkhorn":
            sweeps = self.sinkhorn_sweeps
            return sinkhorn(affinity_LNE, capacity=capacity, tau=tau, num_sweeps=sweeps)
        return balanced_plan(affinity_LNE, capacity=capacity, tau=tau, start=start_LE)


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
            tensors[in_file(part.target, "affinity")] = part.affinity_LNE.cpu().contiguous()
            tensors[in_file(part.target, "router")] = part.router_LED.cpu().contiguous()
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
                f"{path} is no alignment state ({error}). Delete its folder to run the stage again."
            ) from error


@torch.no_grad()
def extract(state: AlignState, split: Granularity, config: AssignmentConfig) -> ExpertLayout:
    """STAGE extract: round the plan at the final temperature to the layout that is exported.

    Router rows are centred over experts first: that changes no routing, and keeps the gates of the
    exported architecture closest to 1. All neurons of leading dense layers are always on.
    """
    if split.beside:
        pairs = zip(parts_of(state), parts_of(split), strict=True)
        return joined(extract(part, of_part, config) for part, of_part in pairs)
    plan = config.solve(state.affinity_LNE, split.capacity, config.tau_end)
    centred_LED = state.router_LED - state.router_LED.mean(dim=1, keepdim=True)
    expert_of_neuron_LN = greedy_assignment(plan.plan, capacity=split.capacity).cpu()
    expert_of_neuron_LN[expert_of_neuron_LN == split.num_experts] = ALWAYS_ON
    expert_of_neuron_LN[: split.first_dense_layers] = ALWAYS_ON
    return ExpertLayout(
        expert_of_neuron_LN=expert_of_neuron_LN,
        router_LED=centred_LED.cpu(),
        active_experts=split.active_experts,
        target=split.target,
    )
