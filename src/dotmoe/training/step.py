"""One optimizer step, or the batch skipped."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dotmoe.distributed import is_first, on_every_rank, sum_over_ranks
from dotmoe.errors import UserError
from dotmoe.training.bad_loss import LossWatch
from dotmoe.training.checkpoints import Checkpoints
from dotmoe.training.config import TrainingConfig
from dotmoe.training.gradients import clip, discard, global_norm, worst_place
from dotmoe.training.memory import gradients_that_fit
from dotmoe.training.optimizer import ParameterGroup, cosine_with_warmup, set_learning_rates
from dotmoe.training.task import Metrics, Task, snapshot

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """How long and how hard to train."""

    steps: int
    warmup_steps: int
    weight_decay: float
    max_grad_norm: float


class Stepper:
    """Takes one step after the other."""

    def __init__(
        self,
        task: Task,
        groups: Sequence[ParameterGroup],
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        training: TrainingConfig,
        watch: LossWatch,
    ) -> None:
        self.task = task
        self.groups = groups
        self.parameters = [p for group in groups for p in group.parameters.values()]
        self.optimizer = optimizer
        self.schedule = schedule
        self.training = training
        self.watch = watch

    def take(self, step: int, checkpoints: Checkpoints) -> Metrics:
        """Apply one batch, or leave it out where its loss is bad and `on_bad_loss` says so.

        Args:
            step: 0 to `schedule.steps - 1`.
            checkpoints: To name the last one in an error.

        Returns:
            The task's metrics, `grad_norm`, `lr_factor`, and the batches `skipped` so far where
            skipping is allowed; equal on all ranks.

        Raises:
            UserError: The loss is bad and must not be skipped, or no longer.
        """
        schedule = self.schedule
        factor = cosine_with_warmup(
            step, total_steps=schedule.steps, warmup_steps=schedule.warmup_steps
        )
        set_learning_rates(self.optimizer, factor)
        before = snapshot(self.task)
        metrics = gradients_that_fit(self.task, self.parameters, step, before)
        norm = global_norm(self.parameters)
        metrics |= {"grad_norm": float(norm), "lr_factor": factor}
        trouble = self.watch.trouble_in(metrics)
        # Ranks whose numbers differ in the last bit must still decide alike.
        if sum_over_ranks(torch.tensor(int(trouble is not None))).item():
            shown = trouble or "another rank's loss is bad"
            on_every_rank(lambda: self._skip_or_stop(shown, step, checkpoints))
            self.task.restore(before)
        else:
            clip(self.parameters, norm, schedule.max_grad_norm)
            self.optimizer.step()
            self.watch.accept(metrics["loss"])
        discard(self.parameters)
        if self.training.on_bad_loss == "skip":
            metrics["skipped"] = float(self.watch.skipped)
        return metrics

    def _skip_or_stop(self, trouble: str, step: int, checkpoints: Checkpoints) -> None:
        what = f"{trouble} at step {step + 1}; {worst_place(self.groups)}."
        training = self.training
        last = checkpoints.last()
        saved = "There is no checkpoint yet" if last is None else f"The last good one is {last}"
        if training.on_bad_loss == "stop":
            raise UserError(
                f"{what} {saved}. Give --on-bad-loss skip to go on without such batches, or "
                "start again with a lower lr or max_grad_norm."
            )
        if self.watch.skipped_in_a_row == training.max_skipped:
            raise UserError(
                f"{what} {training.max_skipped} batches before it were skipped in a row, which is "
                f"max_skipped. {saved}. Start again with a lower lr or max_grad_norm."
            )
        self.watch.skip()
        if is_first():
            logger.warning("%s The batch is skipped.", what)
