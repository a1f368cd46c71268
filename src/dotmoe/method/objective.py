"""The objective of alignment and finetuning: batch, micro-batches, teacher, losses, gradients."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from dotmoe.common.distributed import num_ranks, rank, sum_over_ranks
from dotmoe.method.config import ObjectiveConfig
from dotmoe.method.losses import Taught, distillation_loss, head_of, next_token_labels
from dotmoe.method.router import dense_only, router_losses
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.hf_config import readout_of
from dotmoe.models.scoring import hidden_states
from dotmoe.text.blocks import TokenBlocks
from dotmoe.training.folder import Metrics

logger = logging.getLogger(__name__)

Teacher = Callable[[Tensor], Taught]
"""Maps the tokens of a micro-batch, [B, T], to what a student learns from; without a gradient."""


def taught_by(dense: DenseModel, tokens_BT: Tensor) -> Taught:
    """What a dense model teaches that has weights of its own."""
    return hidden_states(dense.model, tokens_BT).flatten(0, 1), head_of(dense)


def taught_by_own_weights(dense: DenseModel, tokens_BT: Tensor) -> Taught:
    """What the student itself teaches with routing off; its head is the student's."""
    with dense_only():
        return hidden_states(dense.model, tokens_BT).flatten(0, 1), None


def predicts_answers(is_answer_BT: Tensor | None, tokens_BT: Tensor) -> Tensor:
    """Whether the token after each position is an answer's: bool on the CPU, [B, T].

    Without marks every position counts, the last one of a row too, which has no label.
    """
    if is_answer_BT is None:
        return torch.ones(tokens_BT.shape, dtype=torch.bool)
    is_last_B1 = torch.zeros(len(is_answer_BT), 1, dtype=torch.bool)
    return torch.cat([is_answer_BT[:, 1:], is_last_B1], dim=1)


def places_of(is_counted_BT: Tensor, device: torch.device) -> Tensor | None:
    """Numbers of the positions that count; None if all do, or none does, as in questions alone.

    They are found on the host, which knows the marks, so that no device is waited for.
    """
    if is_counted_BT.all() or not is_counted_BT.any():
        return None
    return is_counted_BT.flatten().nonzero()[:, 0].to(device)


class Objective:
    """The task that the training loop runs: the gradient of eq:total_loss over a batch.

    `dense` is the model that is trained, or whose frozen weights the student uses. A subclass
    defines the student by `begin` and `end`; `teacher` gives what it learns from.
    """

    def __init__(
        self,
        dense: DenseModel,
        blocks: TokenBlocks,
        config: ObjectiveConfig,
        *,
        teacher: Teacher,
        seed: int,
    ) -> None:
        self.dense = dense
        self.blocks = blocks
        self.teacher = teacher
        self.config = config
        self.seed = seed
        self.schedule = config.schedule(blocks.num_blocks)
        if self.schedule.steps < config.steps:
            logger.warning(
                "steps lowered from %d to %d: more would read the %d tokens of the text more than "
                "%g times (max_epochs). --recipe small takes more and smaller steps",
                config.steps,
                self.schedule.steps,
                blocks.num_blocks * blocks.seq_len,
                config.max_epochs,
            )

    def begin(self, step: int) -> dict[str, Tensor]:
        """Prepare a step; return metrics that are not losses, equal on all ranks."""
        return {}

    def end(self) -> None:
        """Complete the gradients after the last micro-batch."""

    def accumulate_gradients(self, step: int) -> Metrics:
        """Compute the gradient of eq:total_loss over one batch; return its losses and metrics.

        KL and cross-entropy are means over the counted positions of the batch, losses of routers
        means over the micro-batches of all ranks, weighted by sequences: equal on any number of
        ranks with the same micro-batches, up to the order of summation.
        """
        size = self.config.batch_size
        metrics = self.begin(step)
        blocks, seed = self.blocks, self.seed
        batch = blocks.batch(step, size, seed, rank(), num_ranks()).to(self.dense.device)
        is_answer = blocks.answers_in_batch(step, size, seed, rank(), num_ranks())
        is_counted = predicts_answers(is_answer, batch)
        num_counted = self._num_counted(step)
        sums: dict[str, Tensor] = {}
        micro = self.config.micro_batch_size
        parts = list(zip(torch.split(batch, micro), torch.split(is_counted, micro), strict=True))
        for number, (rows, is_counted_rows) in enumerate(parts, 1):
            share = len(rows) / size
            weight = 1.0
            if num_counted:
                weight = int(is_counted_rows.sum()) / num_counted / share
            losses = self.losses(rows, places_of(is_counted_rows, rows.device), weight)
            self.differentiate(losses["loss"] * share, is_last=number == len(parts))
            for name, value in losses.items():
                sums[name] = sums.get(name, 0.0) + share * value.detach()
        self.end()
        summed = sum_over_ranks(torch.stack([value.float() for value in sums.values()]))
        # One copy to the host for all figures of the step.
        values = torch.cat([*(value.float().view(1) for value in metrics.values()), summed])
        return dict(zip([*metrics, *sums], values.tolist(), strict=True))

    def _num_counted(self, step: int) -> int:
        """Positions of the batch of all ranks that predict an answer's token; 0 without marks."""
        is_answer_BT = self.blocks.answers_in_batch(step, self.config.batch_size, self.seed)
        if is_answer_BT is None:
            return 0
        return int(predicts_answers(is_answer_BT, is_answer_BT).sum())

    def losses(
        self, tokens_BT: Tensor, counted_P: Tensor | None = None, weight: float = 1.0
    ) -> dict[str, Tensor]:
        """eq:total_loss of a micro-batch (`loss`) and its terms; router losses sum over targets.

        KL and cross-entropy are means over the positions `counted_P`, numbered from 0 over all
        rows; None: over all positions. `weight` is a factor of both: it makes them, by the share of
        its sequences, the micro-batch's part of the mean over the batch.
        This is the one place that says what is learned. The teacher does not run if there is
        nothing to learn from it, because `kl_weight` is 0.
        """
        config = self.config
        taught = None
        if config.kl_weight > 0:
            with torch.profiler.record_function("dense forward"), torch.no_grad():
                taught = self.teacher(tokens_BT)
        with torch.profiler.record_function("student forward"), router_losses() as routers:
            hidden_TD = hidden_states(self.dense.model, tokens_BT).flatten(0, 1)
        labels_T = next_token_labels(tokens_BT.to(hidden_TD.device))
        if counted_P is not None:
            hidden_TD, labels_T = hidden_TD[counted_P], labels_T[counted_P]
            if taught is not None:
                taught = taught[0][counted_P], taught[1]
        with torch.profiler.record_function("head and losses"):
            total, kl, ce = distillation_loss(
                hidden_TD,
                taught,
                head_of(self.dense),
                labels_T,
                readout_of(self.dense.config),
                kl_weight=config.kl_weight,
                ce_weight=config.ce_weight,
            )
        total, kl, ce = weight * total, weight * kl, weight * ce
        of_routers = routers()
        for name, loss in of_routers.items():
            total = total + config.router_loss_weights[name] * loss
        return {"loss": total, "kl": kl, "ce": ce, **of_routers}

    def differentiate(self, loss: Tensor, *, is_last: bool) -> None:
        """Run the backward pass of a micro-batch; `is_last` marks the last one of the step."""
        with torch.profiler.record_function("backward"):
            torch.autograd.backward(loss)

    def state(self) -> dict[str, Tensor]:
        """Tensors that a resumed run needs in addition to the trained parameters."""
        return {}
