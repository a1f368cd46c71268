"""STAGE align: learn affinities and routers under frozen dense weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from dotmoe.data import TokenBlocks
from dotmoe.distributed import full_tensor, mesh, raise_on_all_ranks
from dotmoe.granularity import Granularity, joined, parts_of
from dotmoe.models.dense import DenseModel
from dotmoe.moe.assignment import AlignState, Assignment, AssignmentConfig
from dotmoe.moe.masked import Masking, masked, recomputing
from dotmoe.moe.objective import Objective, ObjectiveConfig, require_trainable
from dotmoe.options import above, at_least, between
from dotmoe.training.loop import DEFAULT_TRAINING, OnStep, ParameterGroup, TrainingConfig, train
from dotmoe.transport import TransportPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignConfig(ObjectiveConfig):
    """The alignment phase. Defaults are the paper's (tab:hyperparams_moefication) unless said."""

    steps: Annotated[int, at_least(0)] = 3500
    """Optimizer steps; 0 extracts the initial state as it is."""
    batch_size: Annotated[int, at_least(1)] = 64
    lr: Annotated[float, above(0)] = 5e-4
    lr_affinity: Annotated[float, at_least(0)] | None = None
    """Peak learning rate of the affinities; default: lr."""
    warmup_ratio: Annotated[float, between(0, 1)] = 0.2
    """Share of the steps in which the rate rises and the temperature falls, both linearly."""
    kl_weight: Annotated[float, at_least(0)] = 2.0
    z_loss_weight: Annotated[float, at_least(0)] = 1e-3
    balance_weight: Annotated[float, at_least(0)] = 1e-2
    learn_assignment: bool = True
    """False keeps the initial split and trains routers only (as the random-split baseline does)."""


class _Learned:
    """What is learned of one target, and the masking that follows it."""

    def __init__(
        self,
        dense: DenseModel,
        initial: AlignState,
        split: Granularity,
        config: AlignConfig,
        assignment: AssignmentConfig,
        prefix: str,
    ) -> None:
        first = split.first_dense_layers
        self.initial, self.config, self.prefix = initial, config, prefix
        self.assignment = Assignment(
            initial.affinity_LNE[first:],
            initial.router_LED[first:],
            split.capacity,
            assignment,
            mesh(dense.device),
            is_learned=config.learn_assignment,
        )
        self.plan_LNE: Tensor | None = None
        self.plan: TransportPlan | None = None
        shape = self.assignment.affinity_LNE.shape
        self.masking = Masking(
            active_experts=split.active_experts,
            expert_of_neuron_LN=torch.full(shape[:2], -1, device=dense.device),
            router_LED=(),
            surrogate=config.surrogate,
            surrogate_temperature=config.surrogate_temperature,
            fixed=(1.0,) * (split.columns - split.num_experts),
            first_layer=first,
            target=split.target,
        )
        if not config.learn_assignment:
            fixed = self.assignment.plan(assignment.tau_end)
            self.masking.expert_of_neuron_LN = self.assignment.rounded(fixed)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Router, and affinities where the assignment is learned."""
        config = self.config
        router, affinity = self.assignment.router_LED, self.assignment.affinity_LNE
        rate = config.lr if config.lr_affinity is None else config.lr_affinity
        groups = [("router", router, config.router_rate), ("affinity", affinity, rate)]
        return [
            ParameterGroup(
                name=self.prefix + name,
                parameters={self.prefix + name: p},
                lr=lr,
                first_layer=self.masking.first_layer,
            )
            for name, p, lr in groups[: 2 if config.learn_assignment else 1]
        ]

    def begin(self, tau: float) -> dict[str, Tensor]:
        """Solve and round the plan of a step, which the masks follow from here on."""
        assignment, masking = self.assignment, self.masking
        self.routers_LED = full_tensor(assignment.router_LED.detach()).detach().requires_grad_()
        # Indexed layer by layer, each layer's gradient would be as large as that of all layers.
        masking.router_LED = self.routers_LED.unbind()
        if not self.config.learn_assignment:
            return {}
        self.plan = plan = assignment.plan(tau)
        before, assigned = masking.expert_of_neuron_LN, assignment.rounded(plan)
        masking.expert_of_neuron_LN = assigned
        # Stands for the plan of all layers where only its gradient is wanted; takes no memory.
        nothing = torch.zeros((), device=assigned.device)
        self.plan_LNE = nothing.expand(assignment.affinity_LNE.shape).requires_grad_()
        masking.plan_LNE = self.plan_LNE.unbind()
        moved = (assigned != before) & (before >= 0)  # the first assignment has none before it
        said = {"moved_fraction": moved.float().mean(), **assignment.quality(plan, assigned)}
        return {self.prefix + name: value for name, value in said.items()}

    def end(self) -> None:
        """Backward from the gradients that the masks left to affinities and routers."""
        if self.plan is not None and self.plan_LNE is not None and self.plan_LNE.grad is not None:
            self.assignment.backward_plan(self.plan, self.plan_LNE.grad)
        if self.routers_LED.grad is not None:
            self.assignment.backward_routers(self.routers_LED.grad)
        self._forget_plan()

    def state(self) -> dict[str, Any]:
        """The warm start of the solver and the last assignment."""
        known = {
            "potential": self.assignment.potential_LE,
            "assignment": self.masking.expert_of_neuron_LN,
        }
        return {self.prefix + name: value for name, value in known.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Inverse of `state`; also forgets a step that was cut off."""
        self.assignment.potential_LE = state[f"{self.prefix}potential"]
        self.masking.expert_of_neuron_LN = state[f"{self.prefix}assignment"]
        self._forget_plan()

    def learned(self, steps: int) -> AlignState:
        """What is learned now; leading dense layers as at the start. Every rank must ask."""
        initial = self.initial
        affinity, router = (
            torch.cat([before[: self.masking.first_layer], full_tensor(now.detach())])
            for before, now in (
                (initial.affinity_LNE, self.assignment.affinity_LNE),
                (initial.router_LED, self.assignment.router_LED),
            )
        )
        return replace(initial, affinity_LNE=affinity, router_LED=router, step=steps)

    def _forget_plan(self) -> None:
        self.plan = self.plan_LNE = self.masking.plan_LNE = None


class Alignment(Objective):
    """The masked model as a student of the dense one; its micro-batches share a step's plan."""

    config: AlignConfig
    routings: Sequence[Masking]

    def __init__(
        self,
        dense: DenseModel,
        blocks: TokenBlocks,
        initial: AlignState,
        granularity: Granularity,
        config: AlignConfig,
        assignment: AssignmentConfig,
        *,
        warmup_steps: int,
        seed: int,
    ) -> None:
        targets = zip(parts_of(initial), parts_of(granularity), ("", "attention_"), strict=False)
        self.parts = [
            _Learned(dense, state, split, config, assignment, prefix)
            for state, split, prefix in targets
        ]
        """What is learned of each target; of a second one by names of its own."""
        self.tau, self.warmup_steps = assignment.tau, warmup_steps
        super().__init__(dense, [part.masking for part in self.parts], blocks, config, seed=seed)

    def parameter_groups(self) -> Sequence[ParameterGroup]:
        """Routers, and affinities where the assignment is learned."""
        return [group for part in self.parts for group in part.parameter_groups()]

    def begin(self, step: int) -> dict[str, Tensor]:
        """Solve and round the plans of a step, which the masks follow from here on."""
        tau, said = self.tau(step, self.warmup_steps), dict[str, Tensor]()
        for part in self.parts:
            said |= part.begin(tau)
        return said and said | {"tau": torch.tensor(tau, device=self.dense.device)}

    def end(self) -> None:
        """Backward from the gradients that the masks left to affinities and routers."""
        for part in self.parts:
            part.end()

    def state(self) -> dict[str, Any]:
        """With the warm start of the solvers and the last assignments."""
        known = super().state()
        for part in self.parts:
            known |= part.state()
        return known

    def restore(self, state: dict[str, Any]) -> None:
        """Inverse of `state`; also forgets a step that was cut off."""
        super().restore(state)
        for part in self.parts:
            part.restore(state)

    def learned(self, steps: int) -> AlignState:
        """What is learned now. Every rank must ask."""
        return joined(part.learned(steps) for part in self.parts)


def align(
    dense: DenseModel,
    blocks: TokenBlocks,
    initial: AlignState,
    granularity: Granularity,
    config: AlignConfig,
    assignment: AssignmentConfig,
    *,
    folder: Path,
    seed: int,
    training: TrainingConfig = DEFAULT_TRAINING,
    on_step: OnStep = lambda step, metrics: None,
) -> AlignState:
    """Train A and W_r so that the masked model follows the dense one (eq:total_loss).

    Under torchrun each rank takes an equal part of every batch and solves the assignment of some
    layers; all ranks call this together, and return the same state. That of leading dense layers is
    the initial one.

    Args:
        dense: The frozen model; teacher and student share its weights.
        blocks: Training text.
        initial: Where to start; left untouched.
        granularity: Gives k, the shared expert's size, and the leading layers that stay dense.
        config: See `AlignConfig`.
        assignment: Solver and temperatures.
        folder: See `train`, as of `training` and `on_step`.
        seed: Of the data order.
        training: How often to save, what to do with bad values, and where to log.
        on_step: Called after each step.

    Raises:
        UserError: See `train`; or the model was loaded in float16.
    """
    schedule = config.schedule(blocks.num_blocks)
    if schedule.steps == 0:
        return initial
    dtype = next(dense.model.parameters()).dtype
    raise_on_all_ranks(lambda: require_trainable(config, dtype))
    task = Alignment(
        dense,
        blocks,
        initial,
        granularity,
        config,
        assignment,
        warmup_steps=schedule.warmup_steps,
        seed=seed,
    )
    with masked(dense, task.routings), recomputing(dense, config.activation_checkpointing):
        train(task, schedule, folder, training, on_step)
    return task.learned(schedule.steps)
