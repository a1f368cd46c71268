"""The loop: rate, gradient, clip, step, log, save. What is learned is the task's affair."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch

from dotmoe.distributed import is_first, sum_over_ranks
from dotmoe.errors import Interrupted
from dotmoe.training.bad_loss import LossWatch
from dotmoe.training.checkpoints import Checkpoints
from dotmoe.training.config import DEFAULT_TRAINING, TrainingConfig
from dotmoe.training.loggers import loggers
from dotmoe.training.optimizer import ParameterGroup, adamw
from dotmoe.training.signals import StopRequest, stop_requests
from dotmoe.training.state import TrainingState
from dotmoe.training.step import Schedule, Stepper
from dotmoe.training.task import Metrics, Task

__all__ = ["Metrics", "ParameterGroup", "Schedule", "Task", "checkpoints_in", "train"]


def train(
    task: Task,
    schedule: Schedule,
    folder: Path,
    training: TrainingConfig = DEFAULT_TRAINING,
    on_step: Callable[[int, Metrics], None] = lambda step, metrics: None,
) -> None:
    """Train to `schedule.steps`, from the newest whole checkpoint in `folder` if it has one.

    All ranks call it together, with a folder that all of them see. On one rank of one CPU thread
    count, a run that was killed and resumed ends bit-identical to one that was not.

    Args:
        task: What is trained.
        schedule: How long and how hard.
        folder: Receives `checkpoints/` and `metrics.jsonl` (one object a step).
        training: How often to save, what to do with bad values, and where to log.
        on_step: Called on every rank after each step, with its number (from 1) and metrics.

    Raises:
        UserError: Every checkpoint is damaged; the loss is not finite or explodes; out of memory at
            the smallest micro-batch; or a package for a log is missing.
        Interrupted: SIGTERM or SIGINT came; the step it came in has been saved.
    """
    training.check()
    groups = task.parameter_groups()
    optimizer = adamw(groups, weight_decay=schedule.weight_decay)
    watch = LossWatch(training)
    state = TrainingState(task, groups, optimizer, watch)
    checkpoints = checkpoints_in(folder, training)
    first_step = state.resume(checkpoints)
    stepper = Stepper(task, groups, optimizer, schedule, training, watch)
    clock = _Clock(training)
    with loggers(folder, training.log_to, first_step) as logs, stop_requests() as request:
        for step in range(first_step, schedule.steps):
            started = time.perf_counter()
            metrics = stepper.take(step, checkpoints)
            metrics["seconds"] = time.perf_counter() - started
            for log in logs:
                log.log(step + 1, metrics)
            on_step(step + 1, metrics)
            signum, save = _agree(request, due=clock.is_due(step + 1))
            if save or signum is not None or step + 1 == schedule.steps:
                state.save(checkpoints, step + 1)
                clock.restart()
            if signum is not None:
                name = signal.Signals(signum).name
                raise Interrupted(signum, f"{name} stopped it after step {step + 1}, now saved")


def checkpoints_in(folder: Path, training: TrainingConfig = DEFAULT_TRAINING) -> Checkpoints:
    """The checkpoints that `train` writes in a stage's folder."""
    return Checkpoints(folder / "checkpoints", training.keep_checkpoints)


class _Clock:
    """Says when the next checkpoint is due, by steps or by time."""

    def __init__(self, training: TrainingConfig) -> None:
        self._steps = training.checkpoint_every
        self._seconds = 60 * training.checkpoint_minutes
        self.restart()

    def restart(self) -> None:
        self._started = time.monotonic()

    def is_due(self, step: int) -> bool:
        return step % self._steps == 0 or time.monotonic() - self._started >= self._seconds


def _agree(request: StopRequest, *, due: bool) -> tuple[int | None, bool]:
    """Which signal any rank has had, and whether the first rank's clock says to save."""
    wishes = torch.tensor(
        [request.signum == signal.SIGTERM, request.signum == signal.SIGINT, due and is_first()],
        dtype=torch.int64,
    )
    terminate, interrupt, save = sum_over_ranks(wishes).tolist()
    if terminate:
        return signal.SIGTERM, bool(save)
    return (signal.SIGINT if interrupt else None), bool(save)
