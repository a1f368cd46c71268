"""The loop: rate, gradient, clip, step, log, save; and signals that ask it to stop."""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from dotmoe.distributed import (
    full_tensor,
    is_rank_zero,
    num_ranks,
    raise_on_all_ranks,
    sum_over_ranks,
)
from dotmoe.errors import Interrupted, UserError, require_package
from dotmoe.options import at_least
from dotmoe.training.folder import Checkpoints, Destination, Metrics, OnStep, loggers

ParameterGroup = dict[str, Any]
"""As torch's optimizers take it: `params`, pairs of name and parameter, and their peak `lr`.

Names are those of checkpoints. Either all parameters are plain tensors, equal on all ranks, or
DTensors, of which a rank may hold no part."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_MINUTES = 30
"""Between checkpoints, where steps are so long that these pass first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """Checkpoints and logs of every training stage; nothing changes what is learned."""

    checkpoint_every: Annotated[int, at_least(1)] = 100
    """Steps between checkpoints, of which the newest two are kept."""
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


class Task(Protocol):
    """What the loop trains."""

    schedule: Schedule

    def parameter_groups(self) -> list[ParameterGroup]:
        """What is trained."""

    def accumulate_gradients(self, step: int) -> Metrics:
        """Forward and backward of one optimizer step, a function of parameters, step and state.

        On return every parameter's `.grad` is the gradient of the whole batch, over all ranks; that
        of a DTensor is a DTensor. The metrics are equal on all ranks; one is called `loss`.
        """

    def state(self) -> dict[str, Tensor]:
        """Tensors of fixed shapes that a resumed run needs, too: it reads them in place."""


def train(
    task: Task,
    folder: Path,
    training: TrainingConfig = DEFAULT_TRAINING,
    on_step: OnStep = lambda step, metrics: None,
) -> None:
    """Train to the end of the schedule, from the newest whole checkpoint in `folder`, if any.

    All ranks call it together, with a folder that all of them see: it receives `checkpoints/`, and
    `metrics.jsonl` with one object a step. `on_step` is called on every rank. On one rank of one
    CPU thread count, a run that was killed and resumed ends bit-identical to one that was not.

    Raises:
        UserError: Every checkpoint is damaged, or a loss or gradient is not finite.
        Interrupted: SIGTERM or SIGINT came; the step it came in has been saved.
    """
    schedule, optimizer, checkpoints = task.schedule, adamw(task), Checkpoints(folder)
    saved = checkpoints.load(_tensors(task, optimizer))
    first_step, last_save = saved["step"] if saved else 0, time.monotonic()
    with loggers(folder, training.log_to, first_step) as logs, stop_requests() as wanted:
        for step in range(first_step, schedule.steps):
            started = time.perf_counter()
            metrics = task.accumulate_gradients(step)
            rate = cosine_with_warmup(
                step, total_steps=schedule.steps, warmup_steps=schedule.warmup_steps
            )
            norm = update(optimizer, schedule.max_grad_norm, rate)
            metrics |= {"grad_norm": float(norm), "lr_factor": rate}
            _require_finite(metrics, step, checkpoints)
            metrics["seconds"] = time.perf_counter() - started
            for tell in (*logs, on_step):
                tell(step + 1, metrics)
            is_due = (step + 1) % training.checkpoint_every == 0
            is_due |= time.monotonic() - last_save >= 60 * _MINUTES
            # Whether any rank has had a signal, and whether rank 0 wants a checkpoint.
            wishes = [*(number in wanted for number in _SIGNALS), is_due and is_rank_zero()]
            *got, save = sum_over_ranks(torch.tensor(wishes).long()).tolist()
            if any(got) or save or step + 1 == schedule.steps:
                checkpoints.save(step + 1, _tensors(task, optimizer), {"step": step + 1})
                last_save = time.monotonic()
            for number, count in zip(_SIGNALS, got, strict=True):
                if count:
                    text = f"{number.name} stopped it after step {step + 1}, now saved"
                    raise Interrupted(number, text)


def _tensors(task: Task, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All that a resumed run needs, by name."""
    tensors = {f"task.{name}": tensor for name, tensor in task.state().items()}
    for name, parameter in parameters_of(optimizer).items():
        tensors[f"parameter.{name}"] = parameter.detach()
        for moment, tensor in optimizer.state[parameter].items():
            tensors[f"{moment}.{name}"] = tensor
    return tensors


def _require_finite(metrics: Metrics, step: int, checkpoints: Checkpoints) -> None:
    """Refuse to go on where a loss or gradient is not finite, on all ranks alike."""
    bad = [f"{name} is {value}" for name, value in metrics.items() if not math.isfinite(value)]

    def stop() -> None:
        last = max(checkpoints.folder.glob("step_*"), default=None)
        saved = "There is no checkpoint yet" if last is None else f"The last good one is {last}"
        raise UserError(
            f"{bad[0]} at step {step + 1}. {saved}. Start again with a lower lr or max_grad_norm."
        )

    if bad:
        raise_on_all_ranks(stop)


def adamw(task: Task) -> torch.optim.AdamW:
    """AdamW over groups, which remember their `peak_lr`, with moments to read a checkpoint into."""
    groups = [group | {"peak_lr": group["lr"]} for group in task.parameter_groups()]
    optimizer = torch.optim.AdamW(groups, weight_decay=task.schedule.weight_decay)
    for parameter in parameters_of(optimizer).values():
        optimizer.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return optimizer


def parameters_of(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters of all groups by name."""
    found = dict[str, Tensor]()
    for group in optimizer.param_groups:
        found |= zip(group["param_names"], group["params"], strict=True)
    return found


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


def update(optimizer: torch.optim.Optimizer, max_norm: float, factor: float) -> Tensor:
    """Clip gradients to `max_norm`, take a step at `factor` of the peak rates, and discard them.

    Returns their Euclidean norm before, over all ranks and the same on each, [].
    """
    parameters = parameters_of(optimizer).values()
    norm = full_tensor(get_total_norm([p.grad for p in parameters if p.grad is not None]))
    clip_grads_with_norm_(parameters, max_norm, norm)
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
    optimizer.step()
    optimizer.zero_grad()
    return norm


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
