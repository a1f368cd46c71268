"""STAGE align: learn affinities and routers under frozen dense weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dotmoe.artifacts import AlignState, DenseModel
from dotmoe.data import TokenBlocks
from dotmoe.errors import UserError
from dotmoe.moe.assignment import AssignmentConfig, hard_assignment, soft_plan
from dotmoe.moe.distillation import distillation_loss, next_token_labels
from dotmoe.moe.masked_ffn import Masking
from dotmoe.moe.router import Surrogate
from dotmoe.moe.surgery import masked, recomputing
from dotmoe.training.loop import Metrics, Schedule, train
from dotmoe.training.optimizer import ParameterGroup
from dotmoe.transport import TransportPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignConfig:
    """The alignment phase. Defaults are the paper's (tab:hyperparams_moefication) unless said."""

    steps: int = 3500
    """Optimizer steps; 0 extracts the initial state as it is."""
    batch_size: int = 64
    """Sequences per optimizer step."""
    micro_batch_size: int = 4
    """Sequences per forward pass; gradients add up to the batch. Changes memory, not the result."""
    max_epochs: float = 4.0
    """Passes over the data at most; fewer steps are taken where the data would be repeated more."""
    lr: float = 5e-4
    """Peak learning rate, for whatever has no rate of its own."""
    lr_affinity: float | None = None
    """Peak learning rate of the affinities; default: lr."""
    lr_router: float | None = None
    """Peak learning rate of the routers; default: lr."""
    weight_decay: float = 1e-4
    """AdamW weight decay."""
    warmup_ratio: float = 0.2
    """Share of the steps in which the rate rises and the temperature falls, both linearly."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    kl_weight: float = 2.0
    """Weight of KL(dense || MoE)."""
    ce_weight: float = 1.0
    """Weight of next-token cross-entropy."""
    z_loss_weight: float = 1e-3
    """Weight of the router z-loss (eq:z_loss), averaged over layers."""
    balance_weight: float = 1e-2
    """Weight of load balancing (eq:balance_loss), averaged over layers."""
    surrogate: Surrogate = "soft_top_k"
    """Soft mask of the router's gradient: `softmax` is the paper's, `soft_top_k` sums to k."""
    surrogate_temperature: float = 1.0
    """Temperature of `soft_top_k`, in units of router logits."""
    learn_assignment: bool = True
    """False keeps the initial split and trains routers only (as the random-split baseline does)."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, about a third more time."""
    checkpoint_every: int = 100
    """Steps between checkpoints."""


def steps_to_take(config: AlignConfig, num_blocks: int) -> int:
    """`config.steps`, or fewer where the data would be seen more than `max_epochs` times."""
    if config.steps == 0:
        return 0
    return min(config.steps, max(1, int(config.max_epochs * num_blocks / config.batch_size)))


def align(
    dense: DenseModel,
    blocks: TokenBlocks,
    initial: AlignState,
    active_experts: int,
    config: AlignConfig,
    assignment: AssignmentConfig,
    *,
    folder: Path,
    seed: int,
    first_dense_layers: int = 0,
    on_step: Callable[[int, Metrics], None] = lambda step, metrics: None,
) -> AlignState:
    """Train A and W_r so that the masked model follows the dense one (eq:total_loss).

    Args:
        dense: The frozen model; teacher and student share its weights.
        blocks: Training text.
        initial: Where to start; left untouched.
        active_experts: k.
        config: See `AlignConfig`.
        assignment: Solver and temperatures.
        folder: Receives `metrics.jsonl` and `checkpoint.pt`; a checkpoint there is resumed from.
        seed: Of the data order.
        first_dense_layers: Leading layers that stay dense; their part of the state is not trained.
        on_step: Called after each step with its number and metrics.

    Returns:
        The trained state.
    """
    steps = steps_to_take(config, blocks.num_blocks)
    if steps == 0:
        return initial
    if next(dense.model.parameters()).dtype == torch.float16:
        raise UserError(
            "dtype is float16, in which the gradients of the masks underflow. "
            "Align with --dtype bfloat16 or float32."
        )
    schedule = Schedule(
        steps=steps,
        warmup_steps=round(config.warmup_ratio * steps),
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        checkpoint_every=config.checkpoint_every,
    )
    task = Alignment(
        dense,
        blocks,
        initial,
        active_experts,
        config,
        assignment,
        warmup_steps=schedule.warmup_steps,
        seed=seed,
        first_dense_layers=first_dense_layers,
    )
    with masked(dense, task.masking), recomputing(dense, config.activation_checkpointing):
        train(task, schedule, folder, on_step)
    return AlignState(
        affinity_LNE=task.affinity_LNE.detach(), router_LED=task.router_LED.detach(), step=steps
    )


class Alignment:
    """The task that the training loop runs."""

    def __init__(
        self,
        dense: DenseModel,
        blocks: TokenBlocks,
        initial: AlignState,
        active_experts: int,
        config: AlignConfig,
        assignment: AssignmentConfig,
        *,
        warmup_steps: int,
        seed: int,
        first_dense_layers: int = 0,
    ) -> None:
        self.dense = dense
        self.blocks = blocks
        self.config = config
        self.assignment = assignment
        self.warmup_steps = warmup_steps
        self.seed = seed
        self.affinity_LNE = nn.Parameter(
            initial.affinity_LNE.float().clone(), requires_grad=config.learn_assignment
        )
        self.router_LED = nn.Parameter(initial.router_LED.float().clone())
        self.potential_LE: Tensor | None = None
        self.plan_LNE: Tensor | None = None
        self.masking = Masking(
            expert_of_neuron_LN=hard_assignment(self._plan(tau=assignment.tau_end)),
            router_LED=self.router_LED,
            active_experts=active_experts,
            surrogate=config.surrogate,
            surrogate_temperature=config.surrogate_temperature,
            first_layer=first_dense_layers,
        )

    def parameter_groups(self) -> Sequence[ParameterGroup]:
        """Routers, and affinities where the assignment is learned."""
        config = self.config
        router_lr = config.lr if config.lr_router is None else config.lr_router
        affinity_lr = config.lr if config.lr_affinity is None else config.lr_affinity
        groups = [ParameterGroup(name="router", parameters=[self.router_LED], lr=router_lr)]
        if config.learn_assignment:
            groups.append(
                ParameterGroup(name="affinity", parameters=[self.affinity_LNE], lr=affinity_lr)
            )
        return groups

    def accumulate_gradients(self, step: int) -> Metrics:
        """Gradient of eq:total_loss over one batch; its micro-batches share one plan."""
        config = self.config
        plan, metrics = self.assign(step) if config.learn_assignment else (None, {})
        batch = self.blocks.batch(step, config.batch_size, self.seed).to(self.affinity_LNE.device)
        for rows in torch.split(batch, config.micro_batch_size):
            for name, value in self._backward(rows, share=len(rows) / len(batch)).items():
                metrics[name] = metrics[name] + value if name in metrics else value
        if plan is not None:
            self.pass_to_affinities(plan)
        # One copy to the host a step: until here nothing has waited for the device.
        values = torch.stack([value.float() for value in metrics.values()]).tolist()
        return dict(zip(metrics, values, strict=True))

    def assign(self, step: int) -> tuple[TransportPlan, dict[str, Tensor]]:
        """Plan and rounded assignment of a step, which the masks follow from here on."""
        tau = self.assignment.tau(step, self.warmup_steps)
        plan = self._plan(tau)
        before, assignment = self.masking.expert_of_neuron_LN, hard_assignment(plan)
        self.masking.expert_of_neuron_LN = assignment
        self.plan_LNE = plan.plan.detach().requires_grad_()
        return plan, {
            "moved_fraction": (assignment != before).float().mean(),
            "marginal_error": plan.marginal_error.max(),
            "tau": torch.tensor(tau, device=assignment.device),
        }

    def pass_to_affinities(self, plan: TransportPlan) -> None:
        """Backward from the gradient that the masks left on the plan to the affinities."""
        if self.plan_LNE is not None:
            torch.autograd.backward(plan.plan, self.plan_LNE.grad)
        self.plan_LNE = self.masking.plan_LNE = None

    def state(self) -> dict[str, Any]:
        """The warm start of the solver and the last assignment."""
        return {"potential": self.potential_LE, "assignment": self.masking.expert_of_neuron_LN}

    def restore(self, state: dict[str, Any]) -> None:
        """Inverse of `state`."""
        device = self.affinity_LNE.device
        potential = state["potential"]
        self.potential_LE = None if potential is None else potential.to(device)
        self.masking.expert_of_neuron_LN = state["assignment"].to(device)

    def _plan(self, tau: float) -> TransportPlan:
        start = None if self.potential_LE is None else self.potential_LE / tau
        plan = soft_plan(self.affinity_LNE, self.assignment, tau=tau, start_LE=start)
        # In units of affinity, where a change of temperature hardly moves it.
        self.potential_LE = plan.potential.detach() * tau
        return plan

    def _backward(self, rows_BT: Tensor, *, share: float) -> dict[str, Tensor]:
        """Backward of one micro-batch, weighted by its share of the batch."""
        teacher_TD = self.teacher(rows_BT)
        loss, values = self.loss(self.student(rows_BT), teacher_TD, rows_BT)
        self.differentiate(loss * share)
        return {name: value.detach() * share for name, value in values.items()}

    def differentiate(self, loss: Tensor) -> None:
        """Backward through the student, down to routers and plan."""
        torch.autograd.backward(loss)

    @torch.no_grad()
    def teacher(self, tokens_BT: Tensor) -> Tensor:
        """Final hidden states of the dense model, [T, D]."""
        self.masking.enabled = False
        hidden_TD = self._hidden(tokens_BT)
        self.masking.enabled = True
        return hidden_TD

    def student(self, tokens_BT: Tensor) -> Tensor:
        """Final hidden states of the masked model, [T, D]."""
        masking = self.masking
        masking.want_losses()
        # Indexed layer by layer, each layer's gradient would be as large as that of all layers.
        masking.router_LED = self.router_LED.unbind()
        masking.plan_LNE = None if self.plan_LNE is None else self.plan_LNE.unbind()
        return self._hidden(tokens_BT)

    def loss(
        self, student_TD: Tensor, teacher_TD: Tensor, tokens_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """eq:total_loss of a micro-batch, and its parts by name."""
        config = self.config
        distilled = distillation_loss(
            student_TD,
            teacher_TD,
            self.dense.family.head(self.dense.model).weight,
            next_token_labels(tokens_BT),
            kl_weight=config.kl_weight,
            ce_weight=config.ce_weight,
        )
        z, balance = self.masking.take_losses()
        total = distilled.total + config.z_loss_weight * z + config.balance_weight * balance
        parts = {"loss": total, "kl": distilled.kl, "ce": distilled.ce, "z": z, "balance": balance}
        return total, parts

    def _hidden(self, tokens_BT: Tensor) -> Tensor:
        """What the head's matrix turns into logits, [T, D]."""
        trunk = self.dense.family.trunk(self.dense.model)
        hidden: Tensor = trunk(input_ids=tokens_BT, use_cache=False).last_hidden_state
        multipliers = self.dense.family.traits(self.dense.config).multipliers
        return hidden.reshape(-1, hidden.shape[-1]) / multipliers.logits_divisor
