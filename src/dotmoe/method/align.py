"""STAGE align: learn affinities and routers under frozen dense weights."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from dotmoe.common.distributed import mesh, raise_on_all_ranks
from dotmoe.common.sharded import (
    as_divided,
    divided,
    full_tensor,
    local_part,
    own_rows,
    summed_rows,
)
from dotmoe.method.assignment import assignment_plan, rounded
from dotmoe.method.config import AlignConfig, AssignmentConfig
from dotmoe.method.granularity import Granularity, Splits
from dotmoe.method.masked import Masking, masked
from dotmoe.method.objective import Objective, taught_by_own_weights
from dotmoe.method.router import Routing
from dotmoe.method.state import AlignState, States
from dotmoe.method.transport import TransportPlan
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.hooks import recomputing
from dotmoe.text.blocks import TokenBlocks
from dotmoe.training.config import DEFAULT_TRAINING, TrainingConfig
from dotmoe.training.folder import OnStep
from dotmoe.training.loop import ParameterGroup, require_trainable, train

UNASSIGNED = -3
"""Stands in place of an expert number before the first assignment."""


class LearnedAssignment:
    """Affinities and routers of one target's split layers, with their plans and masks.

    All ranks start from the same state; each rank solves its own layers, possibly none.
    """

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
        self.ranks = mesh(dense.device)
        self.initial, self.config, self.assignment = initial, config, assignment
        self.capacity = split.capacity
        self.prefix = prefix
        affinity_LNE, router_LED = initial.affinity_LNE[first:], initial.router_LED[first:]
        self.affinity_LNE = nn.Parameter(divided(affinity_LNE, self.ranks), config.learn_assignment)
        model_dtype = next(dense.model.parameters()).dtype
        self.router_dtype = model_dtype if config.router_dtype == "model" else torch.float32
        self.router_rate = config.lr if config.lr_router is None else config.lr_router
        self.router_LED = nn.Parameter(
            divided(router_LED.float(), self.ranks), requires_grad=self.router_rate > 0
        )
        """Numbers of `router_dtype`, held in float32 so that the optimizer's moments are float32:
        in bfloat16 its mean of squares could only grow, as 0.999 of one rounds back to it."""
        num_layers, num_units, num_columns = affinity_LNE.shape
        zeros_LE = affinity_LNE.new_zeros(num_layers, num_columns, dtype=torch.float64)
        self.potential_LE = divided(zeros_LE, self.ranks)
        """Warm start of the solver: column potentials in units of affinity, in which a change of
        temperature hardly moves them."""
        self.step_layers = list[_StepLayers]()
        """Router and plan of the current step, as its micro-batches use them."""
        unassigned_LN = torch.full((num_layers, num_units), UNASSIGNED, device=dense.device)
        self.masking = _masking_of(split, config, unassigned_LN)
        if not config.learn_assignment:
            self.masking.expert_of_neuron_LN = self.rounded(self.plan(assignment.tau_end))

    def parameter_groups(self) -> list[ParameterGroup]:
        """Router, unless its rate is 0, and affinities where the assignment is learned."""
        learned = [
            ("router", self.router_LED, self.router_rate),
            ("affinity", self.affinity_LNE, self.config.lr),
        ]
        return [
            {"params": [(self.prefix + name, parameter)], "lr": rate}
            for name, parameter, rate in learned
            if parameter.requires_grad
        ]

    def plan(self, tau: float) -> TransportPlan:
        """Solve the soft plan of this rank's layers."""
        start_lE = local_part(self.potential_LE) / tau
        affinity_lNE = local_part(self.affinity_LNE)
        plan = assignment_plan(self.assignment, affinity_lNE, self.capacity, tau, start_lE)
        self.potential_LE = self._divided(plan.potential.detach().double() * tau)
        return plan

    def rounded(self, plan: TransportPlan) -> Int[Tensor, "L N"]:
        """Hard assignment of all layers, the same on every rank."""
        return full_tensor(self._divided(rounded(plan.entries, self.capacity)))

    def begin(self, tau: float) -> dict[str, Tensor]:
        """Solve and round the plan of a step, set the masks from it, and return metrics.

        `soft_hard_gap`, the mean over neurons of 1 - the plan's entry for the assigned expert, is
        half the mean L1 distance between soft and hard rows (eq:assignment_ste).
        """
        masking = self.masking
        self._round_routers()
        routers_LED = full_tensor(self.router_LED.detach()).to(self.router_dtype)
        masking.router_LED = self._for_step(local_part(self.router_LED), routers_LED)
        if not self.config.learn_assignment:
            return {}
        with torch.profiler.record_function("assignment solve"):
            plan = self.plan(tau)
        with torch.profiler.record_function("rounding"):
            before = masking.expert_of_neuron_LN
            assigned = self.rounded(plan)
        masking.expert_of_neuron_LN = assigned
        # Masks do not read the plan, they only give its gradient: one zero stands for all entries.
        zeros_LNE = torch.zeros((), device=assigned.device).expand(self.affinity_LNE.shape)
        masking.plan_LNE = self._for_step(plan.entries, zeros_LNE)
        moved = (assigned != before) & (before != UNASSIGNED)
        own_lN1 = assigned[own_rows(self.affinity_LNE)].unsqueeze(-1)
        chosen_lN = plan.entries.detach().gather(-1, own_lN1).squeeze(-1)
        metrics = {
            "moved_fraction": moved.float().mean(),
            "marginal_error": full_tensor(self._divided(plan.marginal_error.double())).max(),
            "soft_hard_gap": 1 - full_tensor(self._divided(chosen_lN.mean(dim=1))).mean(),
        }
        return {self.prefix + name: value for name, value in metrics.items()}

    def end(self) -> None:
        """Propagate the masks' gradients, summed over ranks, to affinities and routers."""
        with torch.profiler.record_function("assignment gradient"):
            for layers in self.step_layers:
                layers.backward()
        self.step_layers.clear()  # with the plan, which takes memory
        self.masking.plan_LNE = None

    def state(self) -> dict[str, Tensor]:
        """The warm start of the solver and the last assignment."""
        return {
            f"{self.prefix}potential": self.potential_LE,
            f"{self.prefix}assignment": self.masking.expert_of_neuron_LN,
        }

    def learned(self) -> AlignState:
        """The current state; leading dense layers as at the start. Every rank must call it."""
        initial = self.initial
        first = self.masking.first_layer
        self._round_routers()
        affinity_LNE = full_tensor(self.affinity_LNE.detach())
        router_LED = full_tensor(self.router_LED.detach())
        return replace(
            initial,
            affinity_LNE=torch.cat([initial.affinity_LNE[:first], affinity_LNE]),
            router_LED=torch.cat([initial.router_LED[:first], router_LED]),
        )

    def _round_routers(self) -> None:
        """Round the routers, which the optimizer has moved, to the dtype of their values."""
        if self.router_dtype != torch.float32:
            with torch.no_grad():
                self.router_LED.copy_(self.router_LED.to(self.router_dtype))

    def _for_step(self, own: Tensor, whole: Tensor) -> tuple[Tensor, ...]:
        """The layers of `whole` for a step; what they receive reaches `own` if that is trained."""
        if not own.requires_grad:
            return whole.unbind()
        self.step_layers.append(_StepLayers(own, whole, self.ranks))
        return self.step_layers[-1].layers

    def _divided(self, part: Tensor) -> Tensor:
        return as_divided(part, len(self.affinity_LNE), self.ranks)


def _masking_of(split: Granularity, config: AlignConfig, expert_LN: Tensor) -> Masking:
    """The masking of a split's layers, whose routers and plans each step sets."""
    has_shared_expert = split.columns > split.num_experts
    return Masking(
        routing=Routing(
            active_experts=split.active_experts,
            surrogate=config.surrogate,
            in_model_dtype=config.router_dtype == "model",
        ),
        expert_of_neuron_LN=expert_LN,
        router_LED=(),
        fixed=(1.0,) if has_shared_expert else (),
        first_layer=split.first_dense_layers,
        target=split.target,
    )


class _StepLayers:
    """The layers of a tensor, of which each rank has some, as the micro-batches of a step use them.

    `layers` are leaves that hold `whole`, equal on all ranks. Each micro-batch adds to their
    gradients; `backward`, once a step, gives the sum over ranks to `own`, this rank's part.
    """

    def __init__(self, own: Tensor, whole: Tensor, ranks: DeviceMesh | None) -> None:
        self._of_own: tuple[Tensor, ...] = _LayersOfAllRanks.apply(own, whole, ranks)  # type: ignore[no-untyped-call]
        self.layers = tuple(layer.detach().requires_grad_() for layer in self._of_own)

    def backward(self) -> None:
        torch.autograd.backward(self._of_own, [layer.grad for layer in self.layers])


class _LayersOfAllRanks(torch.autograd.Function):
    """`apply(own, whole, ranks)`: the layers of `whole` as functions of `own`, this rank's part.

    Gradient:
        Of `own`, in its dtype: the rank's layers of the sum over ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, own: Tensor, whole: Tensor, ranks: DeviceMesh | None
    ) -> tuple[Tensor, ...]:
        ctx.dtype, ctx.ranks = own.dtype, ranks
        return tuple(layer.detach() for layer in whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_layers: Tensor) -> tuple[Tensor, None, None]:
        return summed_rows(torch.stack(of_layers).to(ctx.dtype), ctx.ranks), None, None


class Alignment(Objective):
    """The masked model as a student of the dense one; its micro-batches share a step's plan.

    Teacher and student share the frozen weights of `dense`. Under torchrun each rank takes an equal
    part of every batch and solves the assignment of some layers. `seed` sets the data order.
    """

    config: AlignConfig

    def __init__(
        self,
        dense: DenseModel,
        blocks: TokenBlocks,
        initial: States,
        splits: Splits,
        config: AlignConfig,
        assignment: AssignmentConfig,
        *,
        seed: int,
    ) -> None:
        self.parts = [
            LearnedAssignment(dense, state, split, config, assignment, prefix)
            for state, split, prefix in zip(initial, splits, ("", "attention_"), strict=False)
        ]
        """One per target; names of a second target start with `attention_`."""
        self.tau = assignment.tau
        self.maskings = [part.masking for part in self.parts]
        teacher = partial(taught_by_own_weights, dense)
        super().__init__(dense, blocks, config, teacher=teacher, seed=seed)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Routers, and affinities where the assignment is learned."""
        return [group for part in self.parts for group in part.parameter_groups()]

    def begin(self, step: int) -> dict[str, Tensor]:
        """Solve and round the plans of a step, set the masks from them, and return metrics."""
        tau = self.tau(step, self.schedule.warmup_steps)
        metrics = dict[str, Tensor]()
        for part in self.parts:
            metrics |= part.begin(tau)
        if not metrics:
            return {}
        return metrics | {"tau": torch.tensor(tau, device=self.dense.device)}

    def end(self) -> None:
        """Propagate the masks' gradients to affinities and routers."""
        for part in self.parts:
            part.end()

    def state(self) -> dict[str, Tensor]:
        """The warm start of the solvers and the last assignments."""
        return {name: tensor for part in self.parts for name, tensor in part.state().items()}

    def learned(self) -> States:
        """The current states. Every rank must call it."""
        return tuple(part.learned() for part in self.parts)


def align(
    task: Alignment,
    folder: Path,
    training: TrainingConfig = DEFAULT_TRAINING,
    on_step: OnStep = lambda step, metrics: None,
) -> States:
    """Train A and W_r so that the masked model follows the dense one (eq:total_loss).

    All ranks must call this together. They return the same states, in which leading dense layers
    are as in the initial ones. See `train` for the other arguments. Raises a `UserError` as `train`
    does, or if the model was loaded in float16.
    """
    dense, config = task.dense, task.config
    raise_on_all_ranks(lambda: require_trainable(next(dense.model.parameters()).dtype))
    with masked(dense, task.maskings), recomputing(dense, config.activation_checkpointing):
        train(task, folder, training, on_step)
    return task.learned()
