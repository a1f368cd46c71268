"""The objective of alignment and finetuning: batch, micro-batches, teacher, losses, gradients."""

import logging
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from dotmoe.common.distributed import num_ranks, rank, sum_over_ranks
from dotmoe.common.errors import UserError
from dotmoe.common.options import HOW, above, at_least, between
from dotmoe.method.router import Surrogate, dense_only, router_losses
from dotmoe.models.family import DenseModel
from dotmoe.text.blocks import TokenBlocks
from dotmoe.training.folder import Metrics
from dotmoe.training.loop import Schedule, named_range
from dotmoe.training.losses import (
    Taught,
    distillation_loss,
    head_of,
    hidden_states,
    next_token_labels,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConfig:
    """Options that alignment and finetuning share, with the defaults of alignment.

    The defaults are the paper's (tab:hyperparams_moefication) unless noted otherwise.
    """

    steps: Annotated[int, at_least(0)] = 3500
    """Number of optimizer steps of the alignment; 0: none, the start is extracted unchanged."""
    batch_size: Annotated[int, at_least(1)] = 64
    """Sequences per step of the training, over all ranks, which share them equally."""
    micro_batch_size: Annotated[int, at_least(1)] = 4
    """Sequences per forward pass; gradients accumulate over the batch. It affects memory and, of
    the losses, only load balancing, which counts tokens per micro-batch. Fixed when resuming."""
    max_epochs: Annotated[float, above(0)] | None = 4.0
    """Maximum passes over the data; if `steps` exceeds them, fewer are taken, with a warning. None:
    no maximum (paper)."""
    lr: Annotated[float, above(0)] = 5e-4
    """Peak learning rate of the alignment, of all parameters without a rate of their own."""
    lr_router: Annotated[float, at_least(0)] | None = None
    """Peak learning rate of the routers; default: lr."""
    weight_decay: Annotated[float, at_least(0)] = 1e-4
    """AdamW weight decay."""
    warmup_ratio: Annotated[float, between(0, 1)] = 0.2
    """Share of the steps in which the learning rate rises linearly and, in alignment, the
    temperature falls; afterwards the learning rate falls as a cosine."""
    max_grad_norm: Annotated[float, above(0)] = 1.0
    """Maximum norm of the gradients; larger ones are scaled down to it."""
    kl_weight: Annotated[float, at_least(0)] = 2.0
    """Weight of the distillation loss KL(dense || MoE) of the alignment."""
    ce_weight: Annotated[float, at_least(0)] = 1.0
    """Weight of the next-token cross-entropy loss."""
    z_loss_weight: Annotated[float, at_least(0)] = 1e-3
    """Weight of the router z-loss (eq:z_loss), averaged over layers."""
    balance_weight: Annotated[float, at_least(0)] = 1e-2
    """Weight of the load-balancing loss (eq:balance_loss), averaged over layers."""
    surrogate: Surrogate = "soft_top_k"
    """Soft mask for the router's gradient: `softmax` (paper) or `soft_top_k` (rows sum to k)."""
    surrogate_temperature: Annotated[float, above(0)] = 1.0
    """Temperature of `soft_top_k`, in units of router logits."""
    router_dtype: Literal["float32", "model"] = "float32"
    """Dtype in which routers compute while they are trained, and are stored in alignment: `model`
    is the model's own (paper). Extraction, evaluation and exports route in float32."""
    activation_checkpointing: Annotated[bool, HOW] = False
    """Recompute each layer in the backward pass: less memory, about a third more time."""

    @property
    def router_weights(self) -> dict[str, float]:
        """Weights of the router losses, by the names of `ROUTER_LOSSES`."""
        return {"z": self.z_loss_weight, "balance": self.balance_weight}

    @property
    def router_rate(self) -> float:
        """Peak learning rate of the routers."""
        return self.lr if self.lr_router is None else self.lr_router

    def check_together(self) -> None:
        """Refuse loss weights that leave nothing to learn from."""
        if self.kl_weight == self.ce_weight == 0:
            raise UserError(
                "kl_weight and ce_weight are both 0, which leaves nothing to learn from. Raise one."
            )

    def schedule(self, num_blocks: int) -> Schedule:
        """Training schedule on a text of `num_blocks` blocks, within `max_epochs`."""
        steps = self.steps
        if self.max_epochs is not None:
            steps = min(steps, max(1, int(self.max_epochs * num_blocks / self.batch_size)))
        return Schedule(
            steps=steps,
            warmup_steps=round(self.warmup_ratio * steps),
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
        )


def require_trainable(dtype: torch.dtype) -> None:
    """Refuse to train in float16."""
    if dtype == torch.float16:
        raise UserError(
            "dtype is float16, in which gradients underflow. "
            "Train with --dtype bfloat16 or float32."
        )


class Objective:
    """The task that the training loop runs: the gradient of eq:total_loss over a batch.

    `dense` is the model that is trained, or whose frozen weights the student uses. A subclass
    defines the student by `begin`, `end` and `teacher`.
    """

    def __init__(
        self,
        dense: DenseModel,
        blocks: TokenBlocks,
        config: ObjectiveConfig,
        *,
        seed: int,
    ) -> None:
        self.dense, self.blocks = dense, blocks
        self.config, self.seed = config, seed
        self.schedule = config.schedule(blocks.num_blocks)
        if self.schedule.steps < config.steps:
            logger.warning(
                "steps lowered from %d to %d: more would read the %d tokens of the text more than "
                "%g times (max_epochs). --recipe small takes more and smaller steps",
                *(config.steps, self.schedule.steps, blocks.num_blocks * blocks.seq_len),
                config.max_epochs,
            )
        self.micro_batch_size = min(config.micro_batch_size, config.batch_size)

    def begin(self, step: int) -> dict[str, Tensor]:
        """Prepare a step; return metrics that are not losses, equal on all ranks."""
        return {}

    def end(self) -> None:
        """Complete the gradients after the last micro-batch."""

    def accumulate_gradients(self, step: int) -> Metrics:
        """Compute the gradient of eq:total_loss over one batch; return its losses and metrics.

        Gradient and losses are means over the micro-batches of all ranks, weighted by sequences:
        equal on any number of ranks with the same micro-batches, up to the order of summation.
        """
        size = self.config.batch_size
        metrics = self.begin(step)
        batch = self.blocks.batch(step, size, self.seed, rank(), num_ranks()).to(self.dense.device)
        sums: dict[str, Tensor] = {}
        parts = torch.split(batch, self.micro_batch_size)
        for number, rows in enumerate(parts, 1):
            share = len(rows) / size
            losses = self.losses(rows, self.teacher(rows))
            self.differentiate(losses["loss"] * share, is_last=number == len(parts))
            for name, value in losses.items():
                sums[name] = sums.get(name, 0.0) + share * value.detach()
        self.end()
        summed = sum_over_ranks(torch.stack([value.float() for value in sums.values()]))
        # One copy to the host for all figures of the step.
        values = torch.cat([*(value.float().view(1) for value in metrics.values()), summed])
        return dict(zip([*metrics, *sums], values.tolist(), strict=True))

    def teacher(self, tokens_BT: Tensor) -> Taught | None:
        """Output of the teacher: of the student with routing off, if both share the weights.

        None if there is nothing to learn from it, because `kl_weight` is 0.
        """
        if not self.config.kl_weight:
            return None
        with named_range("dense forward"), dense_only(), torch.no_grad():
            return hidden_states(self.dense, tokens_BT), None

    def losses(self, tokens_BT: Tensor, taught: Taught | None) -> dict[str, Tensor]:
        """eq:total_loss of a micro-batch (`loss`) and its terms; router losses sum over targets."""
        config = self.config
        with named_range("student forward"), router_losses() as routers:
            hidden_TD = hidden_states(self.dense, tokens_BT)
        with named_range("head and losses"):
            total, kl, ce = distillation_loss(
                hidden_TD,
                taught,
                head_of(self.dense),
                next_token_labels(tokens_BT),
                kl_weight=0.0 if taught is None else config.kl_weight,
                ce_weight=config.ce_weight,
            )
        of_routers = routers()
        for name, loss in of_routers.items():
            total = total + config.router_weights[name] * loss
        return {"loss": total, "kl": kl, "ce": ce, **of_routers}

    def differentiate(self, loss: Tensor, *, is_last: bool) -> None:
        """Run the backward pass of a micro-batch; `is_last` marks the last one of the step."""
        with named_range("backward"):
            torch.autograd.backward(loss)

    def state(self) -> dict[str, Tensor]:
        """Tensors that a resumed run needs in addition to the trained parameters."""
        return {}

    def forget_step(self) -> None:
        """Release what a step that was interrupted has left."""
