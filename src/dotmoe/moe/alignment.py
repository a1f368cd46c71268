"""The alignment phase as the training loop sees it: teacher, student, losses, gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from dotmoe.artifacts import AlignState, DenseModel
from dotmoe.data import TokenBlocks
from dotmoe.distributed import mesh, num_ranks, rank, sum_over_ranks, whole
from dotmoe.moe.assignment import AssignmentConfig
from dotmoe.moe.distillation import distillation_loss, next_token_labels
from dotmoe.moe.learned import Learned
from dotmoe.moe.masked_ffn import Masking
from dotmoe.moe.router import Surrogate
from dotmoe.options import HOW
from dotmoe.training.loop import Metrics
from dotmoe.training.optimizer import ParameterGroup
from dotmoe.transport import TransportPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignConfig:
    """The alignment phase. Defaults are the paper's (tab:hyperparams_moefication) unless said."""

    steps: int = 3500
    """Optimizer steps; 0 extracts the initial state as it is."""
    batch_size: int = 64
    """Sequences per optimizer step; ranks share them equally."""
    micro_batch_size: Annotated[int, HOW] = 4
    """Sequences per forward pass; gradients add up to the batch. Changes memory, and of the losses
    load balancing alone, which counts the tokens of a micro-batch."""
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
    activation_checkpointing: Annotated[bool, HOW] = False
    """Recompute each layer in the backward pass: less memory, about a third more time."""


class Alignment:
    """The task that the training loop runs: the gradient of eq:total_loss over a batch."""

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
        self.micro_batch_size = config.micro_batch_size
        self.learned = Learned(
            initial, assignment, mesh(dense.device), learn_assignment=config.learn_assignment
        )
        self.affinity_LNE, self.router_LED = self.learned.affinity_LNE, self.learned.router_LED
        self.plan_LNE: Tensor | None = None
        self.masking = Masking(
            expert_of_neuron_LN=self.learned.rounded(self.learned.plan(assignment.tau_end)),
            router_LED=self.learned.routers(),
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
        router, affinity = {"router": self.router_LED}, {"affinity": self.affinity_LNE}
        groups = [ParameterGroup(name="router", parameters=router, lr=router_lr, stacked=True)]
        if config.learn_assignment:
            groups.append(
                ParameterGroup(name="affinity", parameters=affinity, lr=affinity_lr, stacked=True)
            )
        return groups

    def accumulate_gradients(self, step: int) -> Metrics:
        """Gradient of eq:total_loss over one batch; its micro-batches share one plan.

        Every loss is the mean over the micro-batches of all ranks, weighted by their sequences: KL
        over all tokens, cross-entropy over those with a label, z-loss over all tokens, and load
        balancing, which counts tokens a micro-batch, over micro-batches. So ranks that have the
        micro-batches of one rank among them have its losses and gradients too, up to the order
        of summation.
        """
        config = self.config
        plan, metrics = self.assign(step) if config.learn_assignment else (None, {})
        router_LED = self.learned.routers()
        # Indexed layer by layer, each layer's gradient would be as large as that of all layers.
        self.masking.router_LED = router_LED.unbind()
        batch = self.blocks.batch(step, config.batch_size, self.seed, rank(), num_ranks())
        losses: dict[str, Tensor] = {}
        for rows in torch.split(batch.to(router_LED.device), self.micro_batch_size):
            for name, value in self._backward(rows, share=len(rows) / config.batch_size).items():
                losses[name] = losses[name] + value if name in losses else value
        if plan is not None:
            self.pass_to_affinities(plan)
        if router_LED.grad is not None:
            self.learned.pass_to_routers(router_LED.grad)
        summed = sum_over_ranks(torch.stack([value.float() for value in losses.values()]))
        # One copy to the host a step: until here nothing has waited for the device.
        values = torch.cat([*(value.float().view(1) for value in metrics.values()), summed])
        return dict(zip([*metrics, *losses], values.tolist(), strict=True))

    def assign(self, step: int) -> tuple[TransportPlan, dict[str, Tensor]]:
        """Plan and rounded assignment of a step, which the masks follow from here on."""
        tau = self.assignment.tau(step, self.warmup_steps)
        plan = self.learned.plan(tau)
        before, assignment = self.masking.expert_of_neuron_LN, self.learned.rounded(plan)
        self.masking.expert_of_neuron_LN = assignment
        self.plan_LNE = self.learned.receiver()
        return plan, {
            "moved_fraction": (assignment != before).float().mean(),
            "marginal_error": self.learned.marginal_error(plan),
            "soft_hard_gap": self.learned.soft_hard_gap(plan, assignment),
            "tau": torch.tensor(tau, device=assignment.device),
        }

    def pass_to_affinities(self, plan: TransportPlan) -> None:
        """Backward from the gradient that the masks left on the plan to the affinities."""
        if self.plan_LNE is not None and self.plan_LNE.grad is not None:
            self.learned.pass_to_affinities(plan, self.plan_LNE.grad)
        self.plan_LNE = self.masking.plan_LNE = None

    def state(self) -> dict[str, Any]:
        """The warm start of the solver and the last assignment."""
        potential_LE = self.learned.potential_LE
        return {"potential": potential_LE, "assignment": self.masking.expert_of_neuron_LN}

    def restore(self, state: dict[str, Any]) -> None:
        """Inverse of `state`."""
        device = self.affinity_LNE.device
        potential = state["potential"]
        self.learned.potential_LE = None if potential is None else potential.to(device)
        self.masking.expert_of_neuron_LN = state["assignment"].to(device)
        # A step that was cut off may have left these; none of them outlives a whole step.
        self.plan_LNE = self.masking.plan_LNE = None
        self.masking.z_losses = self.masking.balance_losses = None
        self.masking.enabled = True

    def halve_micro_batch(self) -> int | None:
        """Take half as many sequences a forward pass; None where one is all there is.

        Gradients still add up to the batch. Load balancing counts tokens a micro-batch, so that
        loss changes a little; the others change by the order of summation alone.
        """
        in_use = min(self.micro_batch_size, self.config.batch_size)
        if in_use == 1:
            return None
        self.micro_batch_size = in_use // 2
        return self.micro_batch_size

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
            whole(self.dense.family.head(self.dense.model).weight),
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
