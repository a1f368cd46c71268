"""The objective of alignment and finetuning: batch, micro-batches, teacher, losses, gradients."""

import logging
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dotmoe.common.distributed import full_tensor, num_ranks, rank, sum_over_ranks
from dotmoe.common.errors import UserError
from dotmoe.common.options import HOW, above, at_least, between
from dotmoe.method.masked import product_in_float32
from dotmoe.method.router import Surrogate, dense_only, router_losses
from dotmoe.models.family import DenseModel
from dotmoe.text.blocks import TokenBlocks
from dotmoe.training.folder import Metrics
from dotmoe.training.loop import Schedule, named_range

logger = logging.getLogger(__name__)

IGNORED = -100
"""Label of a position that has no next token."""
MAX_CHUNK_ELEMENTS = 1 << 25
"""Maximum number of logits in one chunk, per model: 128 MiB in float32."""
CPU_CHUNK_ROWS = 128
"""Maximum number of tokens in one chunk on a CPU, so that its logits stay near the cache."""

Losses = tuple[Float[Tensor, ""], Float[Tensor, ""], Float[Tensor, ""]]
Taught = tuple[Tensor, Tensor | None]
"""A teacher's final hidden states, [T, D], and its head's matrix (None: the student's head)."""


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


def hidden_states(dense: DenseModel, tokens_BT: Tensor) -> Tensor:
    """Final hidden states, [T, D], scaled so that the head's matrix maps them to logits."""
    trunk = dense.family.trunk(dense.model)
    hidden: Tensor = trunk(input_ids=tokens_BT, use_cache=False).last_hidden_state
    multipliers = dense.traits.multipliers
    return hidden.reshape(-1, hidden.shape[-1]) / multipliers.logits_divisor


def head_of(dense: DenseModel) -> Tensor:
    """The matrix of the output head, [V, D], whole on every rank."""
    dense.require("memory", "shards")
    return full_tensor(dense.family.head(dense.model).weight)


def next_token_labels(tokens_BT: Int[Tensor, "B T"]) -> Int[Tensor, " BT"]:
    """Labels of a batch, flat: the next token, and `IGNORED` at the end of each row."""
    return F.pad(tokens_BT[:, 1:], (0, 1), value=IGNORED).flatten()


def distillation_loss(
    student_TD: Float[Tensor, "T D"],
    taught: Taught | None,
    head_VD: Float[Tensor, "V D"],
    labels_T: Int[Tensor, " T"],
    *,
    kl_weight: float,
    ce_weight: float,
) -> Losses:
    """w_kl * KL(dense || MoE) + w_ce * CE(labels) from the hidden states below the head.

    These are the first two terms of eq:total_loss. KL is averaged over all T positions (and is 0
    without a teacher), cross-entropy over those whose label is not `IGNORED`. Softmax is float32.

    Returns:
        The weighted sum, which alone has a gradient; KL; cross-entropy. In nats per token.

    Gradient:
        Flows to `student_TD`, and to `head_VD` if it requires one. It is formed chunk by chunk in
        the forward pass, so memory is one chunk of logits per model (`MAX_CHUNK_ELEMENTS`) plus the
        gradients of these two inputs. The head's gradient is accumulated in float32.
    """
    losses: Losses = _Distillation.apply(  # type: ignore[no-untyped-call]
        student_TD, head_VD, taught, labels_T, kl_weight, ce_weight
    )
    return losses


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student_TD: Tensor,
        head_VD: Tensor,
        taught: Taught | None,
        labels_T: Tensor,
        kl_weight: float,
        ce_weight: float,
    ) -> Losses:
        num_tokens, num_labels = len(labels_T), (labels_T != IGNORED).sum().clamp_min(1)
        kl, ce = torch.zeros(2, device=student_TD.device)
        grad_TD = torch.empty_like(student_TD)
        wide = torch.promote_types(head_VD.dtype, torch.float32)
        grad_VD = torch.zeros_like(head_VD, dtype=wide) if ctx.needs_input_grad[1] else None
        shares = kl_weight / num_tokens, ce_weight / num_labels
        teacher_TD, teacher_head_VD = taught or (None, None)
        if teacher_head_VD is None:
            teacher_head_VD = head_VD
        rows = chunk_rows(len(head_VD), on_cpu=head_VD.device.type == "cpu")
        for start in range(0, num_tokens, rows):
            chunk = slice(start, start + rows)
            teacher = None if teacher_TD is None else (teacher_TD[chunk], teacher_head_VD)
            kl_sum, ce_sum, grad_CV = _chunk(
                (student_TD[chunk], head_VD), teacher, labels_T[chunk], shares
            )
            kl += kl_sum
            ce += ce_sum
            grad_TD[chunk] = grad_CV @ head_VD
            if grad_VD is not None:
                if grad_VD.is_cuda:
                    grad_VD += product_in_float32(grad_CV.T, student_TD[chunk])
                else:  # allocates nothing of the head's size
                    grad_VD.addmm_(grad_CV.T.to(wide), student_TD[chunk].to(wide))
            del grad_CV  # otherwise it would stay in memory with the next chunk's
        kl, ce = kl / num_tokens, ce / num_labels
        ctx.save_for_backward(grad_TD, grad_VD)
        ctx.mark_non_differentiable(kl, ce)
        return kl_weight * kl + ce_weight * ce, kl, ce

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grads = (None if grad is None else _scaled(grad, grad_total) for grad in ctx.saved_tensors)
        return *grads, None, None, None, None


def _scaled(grad: Tensor, factor: Tensor) -> Tensor:
    """The product in the gradient's dtype; in 16 bits a factor such as 1/12 is off by 0.2 %."""
    return (grad.to(torch.promote_types(grad.dtype, factor.dtype)) * factor).to(grad.dtype)


def _chunk(
    student: tuple[Tensor, Tensor],
    teacher: tuple[Tensor, Tensor] | None,
    labels_C: Tensor,
    shares: tuple[float, Tensor],
) -> tuple[Tensor | float, Tensor, Tensor]:
    """Sums of KL and cross-entropy over some tokens, and the gradient of the logits."""
    # At most three tensors of tokens x vocabulary are in memory, not counting 16-bit logits.
    kl_sum: Tensor | float = 0.0
    student_CV = _log_softmax(*student)
    if teacher is not None:
        log_CV = _log_softmax(*teacher)
        teacher_CV = log_CV.exp()
        kl_sum = log_CV.sub_(student_CV).mul_(teacher_CV).sum()
        del log_CV
    ce_sum = F.nll_loss(student_CV, labels_C, ignore_index=IGNORED, reduction="sum")
    student_CV.exp_()
    labels_C1, (kl_share, ce_share) = labels_C.unsqueeze(1), shares
    labelled_C1 = ((labels_C1 != IGNORED) * ce_share).to(student_CV.dtype)
    if teacher is None:
        grad_CV = student_CV.mul_(labelled_C1)
    else:
        grad_CV = torch.sub(student_CV, teacher_CV, out=teacher_CV).mul_(kl_share)
        grad_CV.addcmul_(student_CV, labelled_C1)
    grad_CV.scatter_add_(1, labels_C1.clamp_min(0), -labelled_C1)
    return kl_sum, ce_sum, grad_CV.to(student[1].dtype)


def _log_softmax(hidden_CD: Tensor, head_VD: Tensor) -> Tensor:
    return F.log_softmax((hidden_CD @ head_VD.T).float(), dim=1)


def chunk_rows(vocabulary: int, *, on_cpu: bool) -> int:
    """Maximum number of tokens whose logits are formed at once."""
    rows = max(1, MAX_CHUNK_ELEMENTS // vocabulary)
    return min(rows, CPU_CHUNK_ROWS) if on_cpu else rows
