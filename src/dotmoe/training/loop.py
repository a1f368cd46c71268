"""The loop: rate, gradient, clip, step, log, save; bad losses, too little memory, and signals."""

import gc
import logging
import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Annotated, Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from dotmoe.distributed import (
    full_tensor,
    is_rank_zero,
    num_ranks,
    raise_on_all_ranks,
    sum_over_ranks,
)
from dotmoe.errors import Interrupted, UserError, require_package
from dotmoe.options import at_least, check
from dotmoe.training.folder import Checkpoints, Destination, Metrics, OnStep, loggers

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_CHECKPOINT_SECONDS = 1800
_MAX_LOSS_RATIO = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """Checkpoints, bad values and logs of every training stage; nothing changes what is learned."""

    checkpoint_every: Annotated[int, at_least(1)] = 100
    """Steps between checkpoints; after half an hour one is written in any case."""
    on_bad_loss: Literal["stop", "skip"] = "stop"
    """Where a loss or gradient is not finite, or a loss explodes: `stop`, naming the layer and the
    last checkpoint, or `skip` the batch."""
    max_skipped: Annotated[int, at_least(0)] = 10
    """Batches skipped in a row at most; one more stops the run."""
    log_to: tuple[Destination, ...] = ()
    """Besides `metrics.jsonl`: `tensorboard`, `wandb`, or both."""

    def check_together(self) -> None:
        """Refuse logs whose package is not installed."""
        for package in self.log_to:
            require_package(package, package, f"log_to {package}")


DEFAULT_TRAINING = TrainingConfig()


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """How long and how hard to train."""

    steps: int
    warmup_steps: int
    weight_decay: float
    max_grad_norm: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterGroup:
    """Parameters that share a peak learning rate."""

    parameters: Mapping[str, nn.Parameter]
    """By the names that checkpoints go by. Either all are plain tensors, equal on all ranks, or
    DTensors, of which a rank may hold no part."""
    lr: float
    """Peak learning rate."""
    first_layer: int | None = None
    """Where the first dimension counts layers, the number of its first."""


class Task(Protocol):
    """What the loop trains."""

    def parameter_groups(self) -> Sequence[ParameterGroup]:
        """Parameters with their peak learning rates."""

    def accumulate_gradients(self, step: int) -> Metrics:
        """Forward and backward of one optimizer step, a function of parameters, step and state.

        On return every parameter's `.grad` is the gradient of the whole batch, over all ranks; that
        of a DTensor is a DTensor. The metrics are equal on all ranks; one is called `loss`.
        """

    def state(self) -> dict[str, Any]:
        """Plain values, and tensors of fixed shapes, that a resumed run needs, too."""

    def restore(self, state: dict[str, Any]) -> None:
        """Inverse of `state` but for a halved micro-batch; also after a step failed halfway."""

    def halve_micro_batch(self) -> int | None:
        """Take half as many sequences a forward pass from now on; None where there is but one."""


def train(
    task: Task,
    schedule: Schedule,
    folder: Path,
    training: TrainingConfig = DEFAULT_TRAINING,
    on_step: OnStep = lambda step, metrics: None,
) -> None:
    """Train to `schedule.steps`, from the newest whole checkpoint in `folder` if it has one.

    All ranks call it together, with a folder that all of them see: it receives `checkpoints/`, and
    `metrics.jsonl` with one object a step. `on_step` is called on every rank. On one rank of one
    CPU thread count, a run that was killed and resumed ends bit-identical to one that was not.

    Raises:
        UserError: Every checkpoint is damaged; the loss is not finite or explodes; or a package for
            a log is missing.
        Interrupted: SIGTERM or SIGINT came; the step it came in has been saved.
    """
    check(training)
    trainer = _Trainer(task, schedule, training, folder)
    first_step = trainer.resume()
    last_save = time.monotonic()
    with loggers(folder, training.log_to, first_step) as logs, stop_requests() as wanted:
        for step in range(first_step, schedule.steps):
            started = time.perf_counter()
            metrics = trainer.take(step)
            metrics["seconds"] = time.perf_counter() - started
            for tell in (*logs, on_step):
                tell(step + 1, metrics)
            is_due = (step + 1) % training.checkpoint_every == 0
            is_due |= time.monotonic() - last_save >= _CHECKPOINT_SECONDS
            # Whether any rank has had a signal, and whether rank 0 wants a checkpoint.
            wishes = [*(number in wanted for number in _SIGNALS), is_due and is_rank_zero()]
            *got, save = sum_over_ranks(torch.tensor(wishes).long()).tolist()
            if any(got) or save or step + 1 == schedule.steps:
                trainer.save(step + 1)
                last_save = time.monotonic()
            for number, count in zip(_SIGNALS, got, strict=True):
                if count:
                    text = f"{number.name} stopped it after step {step + 1}, now saved"
                    raise Interrupted(number, text)


def adamw(groups: Sequence[ParameterGroup], *, weight_decay: float) -> torch.optim.AdamW:
    """AdamW over groups, which remember their `peak_lr`, with moments to read a checkpoint into."""
    optimizer = torch.optim.AdamW(
        [{"params": list(g.parameters.values()), "lr": g.lr, "peak_lr": g.lr} for g in groups],
        weight_decay=weight_decay,
    )
    for group in groups:
        for parameter in group.parameters.values():
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
    return optimizer


def cosine_with_warmup(step: int, *, total_steps: int, warmup_steps: int) -> float:
    """Factor on the peak rate of a step: linear from 1/warmup to 1, then half a cosine to 0.

    Example:
        >>> [round(cosine_with_warmup(s, total_steps=4, warmup_steps=2), 2) for s in range(4)]
        [0.5, 1.0, 1.0, 0.5]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * progress))


def update(optimizer: torch.optim.Optimizer, max_norm: float, norm: Tensor, factor: float) -> None:
    """Clip all gradients to `max_norm`, take a step at `factor` of the peak rates, discard them."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    clip_grads_with_norm_(parameters, max_norm, norm)
    optimizer.step()
    optimizer.zero_grad()


def global_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Euclidean norm of all gradients, over all ranks; the same on each. Shape []."""
    return full_tensor(get_total_norm([p.grad for p in parameters if p.grad is not None]))


@dataclass
class LossWatch:
    """Judges the metrics of each step by those of the steps before it; plain values.

    A loss explodes where it is above every loss accepted so far and above ten times the median of
    the last 64; of the first 8 nothing but finiteness is asked. The first condition keeps the
    ordinary spikes of a loss near 0 from counting, and single ones hardly move a median.
    """

    recent: list[float] = field(default_factory=list)
    largest: float = -math.inf
    skipped: int = 0
    """Batches that were not applied so far."""
    skipped_in_a_row: int = 0

    def trouble_in(self, metrics: Metrics) -> str | None:
        """What is wrong with a step's metrics; None where nothing is."""
        for name, value in metrics.items():
            if not math.isfinite(value):
                return f"{name} is {value}"
        loss, count = metrics["loss"], len(self.recent)
        if count < 8 or loss <= self.largest:
            return None
        usual = median(self.recent)
        if loss - usual <= (_MAX_LOSS_RATIO - 1) * abs(usual):
            return None
        return f"loss is {loss:.4g}, where the median of the last {count} is {usual:.4g},"

    def accept(self, loss: float) -> None:
        """Remember the loss of a step that was applied."""
        self.recent = [*self.recent, loss][-64:]
        self.largest = max(self.largest, loss)
        self.skipped_in_a_row = 0


class _Trainer:
    """All that a training run is at the end of a step: what is saved and resumed."""

    def __init__(
        self, task: Task, schedule: Schedule, training: TrainingConfig, folder: Path
    ) -> None:
        self.task, self.schedule, self.training = task, schedule, training
        self.checkpoints = Checkpoints(folder)
        self.groups = task.parameter_groups()
        self.parameters = {n: p for group in self.groups for n, p in group.parameters.items()}
        self.optimizer = adamw(self.groups, weight_decay=schedule.weight_decay)
        self.watch = LossWatch()

    def save(self, step: int) -> None:
        """Write a checkpoint after `step` steps; all ranks together."""
        values = {n: v for n, v in self.task.state().items() if not isinstance(v, Tensor)}
        record = {"step": step, "task": values, "losses": asdict(self.watch)}
        self.checkpoints.save(step, self._tensors(), record)

    def resume(self) -> int:
        """Read the newest whole checkpoint, on any number of ranks; the steps taken before it."""
        tensors = self._tensors()
        if (values := self.checkpoints.load(tensors)) is None:
            return 0
        task = {n.removeprefix("task."): t for n, t in tensors.items() if n.startswith("task.")}
        self.task.restore(task | values["task"])
        self.watch = LossWatch(**values["losses"])
        return int(values["step"])

    def take(self, step: int) -> Metrics:
        """Apply one batch, or leave it out where its loss is bad and `on_bad_loss` says so."""
        training, steps, warmup = self.training, self.schedule.steps, self.schedule.warmup_steps
        factor = cosine_with_warmup(step, total_steps=steps, warmup_steps=warmup)
        before = self._task_state()
        metrics = self._gradients(step, before)
        norm = global_norm(list(self.parameters.values()))
        metrics |= {"grad_norm": float(norm), "lr_factor": factor}
        trouble = self.watch.trouble_in(metrics)
        # Ranks whose numbers differ in the last bit must still decide alike.
        if sum_over_ranks(torch.tensor(int(trouble is not None))).item():
            what = f"{trouble or 'a loss is bad'} at step {step + 1}; {self._worst_place()}."
            raise_on_all_ranks(lambda: self._skip_or_stop(what))
            self.task.restore(before)
            self.optimizer.zero_grad()
        else:
            update(self.optimizer, self.schedule.max_grad_norm, norm, factor)
            self.watch.accept(metrics["loss"])
        if training.on_bad_loss == "skip":
            metrics["skipped"] = float(self.watch.skipped)
        return metrics

    def _tensors(self) -> dict[str, Tensor]:
        """All tensors by name, those of the task copied."""
        state = self._task_state()
        tensors = {f"task.{n}": v for n, v in state.items() if isinstance(v, Tensor)}
        for name, parameter in self.parameters.items():
            tensors[f"parameter.{name}"] = parameter.detach()
            for moment, tensor in self.optimizer.state[parameter].items():
                tensors[f"{moment}.{name}"] = tensor
        return tensors

    def _task_state(self) -> dict[str, Any]:
        """A copy of the task's state that later steps do not write into."""
        return {n: v.clone() if isinstance(v, Tensor) else v for n, v in self.task.state().items()}

    def _gradients(self, step: int, before: dict[str, Any]) -> Metrics:
        """`accumulate_gradients`, with the largest halved micro-batch that fits into memory."""
        while True:
            try:
                return self.task.accumulate_gradients(step)
            except torch.OutOfMemoryError:
                self.optimizer.zero_grad()
                self.task.restore(before)
                # On one of several ranks the others wait in the middle of the step.
                fits = self.task.halve_micro_batch() if num_ranks() == 1 else None
                if fits is None:
                    raise
            logger.warning(
                "out of memory at step %d: micro_batch_size is %d from here on", step + 1, fits
            )
            gc.collect()  # here, where the error's frames hold none of the step's tensors
            torch.cuda.empty_cache()

    def _worst_place(self) -> str:
        """The first gradient of the backward pass that is not finite, or the largest, in words."""
        places: list[tuple[str, int, float]] = []
        for group in self.groups:
            first, is_stack = group.first_layer or 0, group.first_layer is not None
            for name, parameter in reversed(list(group.parameters.items())):
                if parameter.grad is not None:
                    squares = parameter.grad.double().square()
                    sums = full_tensor(squares.flatten(1).sum(dim=1) if is_stack else squares.sum())
                    for layer, size in enumerate(sums.view(-1).tolist(), first):
                        where = f"{name}, layer {layer}" if is_stack else name
                        places.append((where, layer, size))
        if bad := [place for place in places if not math.isfinite(place[2])]:
            where, _, _ = max(bad, key=lambda place: place[1])
            return f"the first gradient that is not finite is that of {where}"
        where, _, _ = max(places, key=lambda place: place[2])
        return f"the largest gradient is that of {where}"

    def _skip_or_stop(self, what: str) -> None:
        """Count a bad batch, or raise the error that ends the run."""
        most, remedy = self.training.max_skipped, "Start"
        if self.training.on_bad_loss == "stop":
            remedy = "Give --on-bad-loss skip to go on without such batches, or start"
        elif self.watch.skipped_in_a_row == most:
            what += f" {most} batches before it were skipped in a row, which is max_skipped."
        else:
            self.watch.skipped += 1
            self.watch.skipped_in_a_row += 1
            if is_rank_zero():
                logger.warning("%s The batch is skipped.", what)
            return
        last = max(self.checkpoints.folder.glob("step_*"), default=None)
        saved = "There is no checkpoint yet" if last is None else f"The last good one is {last}"
        raise UserError(f"{what} {saved}. {remedy} again with a lower lr or max_grad_norm.")


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Inside, signals that ask to stop are recorded instead of interrupting; ignored ones stay so.

    A second SIGINT interrupts at once, except on ranks: one Ctrl-C reaches them twice, from the
    terminal and from torchrun. Handlers belong to the main thread: in others nothing is recorded.
    """
    wanted: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if wanted and number == signal.SIGINT and num_ranks() == 1:
            raise KeyboardInterrupt
        wanted.append(number)

    is_main = threading.current_thread() is threading.main_thread()
    previous = {number: signal.getsignal(number) for number in _SIGNALS if is_main}
    try:
        for number, handler in previous.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, handle)
        yield wanted
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
