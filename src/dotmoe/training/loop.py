"""The training loop: rate, gradient, clip, step, log, save; bad losses, signals."""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from dotmoe.common.distributed import is_rank_zero, num_ranks, raise_on_all_ranks, sum_over_ranks
from dotmoe.common.errors import Interrupted, UserError
from dotmoe.common.sharded import full_tensor
from dotmoe.training.config import DEFAULT_TRAINING, Schedule, TrainingConfig
from dotmoe.training.folder import Checkpoints, Metrics, OnStep, metrics_log

ParameterGroup = dict[str, Any]
"""A parameter group of torch's optimizers: `params`, pairs of name and parameter, and peak `lr`.

Checkpoints use the same names. Either all parameters are plain tensors, equal on all ranks, or
DTensors, of which a rank may hold no part."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_CHECKPOINT_SECONDS = 1800


class Task(Protocol):
    """The interface of what the loop trains."""

    schedule: Schedule

    def parameter_groups(self) -> list[ParameterGroup]:
        """The trained parameters and their peak learning rates."""

    def accumulate_gradients(self, step: int) -> Metrics:
        """Run forward and backward of one step; depends only on parameters, step and state.

        On return every parameter's `.grad` is the gradient of the whole batch, over all ranks; for
        a DTensor it is a DTensor. The metrics are equal on all ranks; one is called `loss`.
        """

    def state(self) -> dict[str, Tensor]:
        """Further tensors that a resumed run needs; the loop fills them, in their fixed shapes."""


def require_trainable(dtype: torch.dtype) -> None:
    """Refuse to train in float16."""
    if dtype == torch.float16:
        raise UserError(
            "dtype is float16, in which gradients underflow. "
            "Train with --dtype bfloat16 or float32."
        )


def train(
    task: Task,
    folder: Path,
    training: TrainingConfig = DEFAULT_TRAINING,
    on_step: OnStep = lambda step, metrics: None,
) -> None:
    """Train to the end of the schedule, from the newest checkpoint in `folder`, if any.

    All ranks must call it, with a folder that all of them see: it receives `checkpoints/`, and
    `metrics.jsonl` with one object per step. `on_step` is called on every rank. On one rank with
    a fixed CPU thread count, a killed and resumed run ends bit-identical to an uninterrupted one.

    Raises:
        UserError: The newest checkpoint is damaged, or a loss or gradient is not finite.
        Interrupted: A signal to stop was received; the step that was running has been saved.
    """
    schedule = task.schedule
    optimizer = adamw(task)
    checkpoints = Checkpoints(folder)
    first_step = checkpoints.load(_tensors(task, optimizer))
    last_save = time.monotonic()
    with metrics_log(folder, first_step) as log, stop_requests() as signals, checkpoints.thread():
        for step in range(first_step, schedule.steps):
            started = time.perf_counter()
            metrics = task.accumulate_gradients(step)
            rate = cosine_with_warmup(
                step, total_steps=schedule.steps, warmup_steps=schedule.warmup_steps
            )
            norm = global_norm(optimizer)
            metrics |= {"grad_norm": float(norm), "lr_factor": rate}
            _require_finite(metrics, step + 1, checkpoints)
            update(optimizer, schedule.max_grad_norm, norm, rate)
            metrics["seconds"] = time.perf_counter() - started
            log(step + 1, metrics)
            on_step(step + 1, metrics)
            is_scheduled = (step + 1) % (training.checkpoint_every or schedule.steps) == 0
            is_overdue = time.monotonic() - last_save >= _CHECKPOINT_SECONDS
            agreed = _agreed(checkpoints, is_scheduled or is_overdue, signals)
            if not agreed.is_writing:
                checkpoints.finish()
            is_last = any(agreed.stops) or step + 1 == schedule.steps
            if is_last or agreed.is_due:
                checkpoints.save(step + 1, _tensors(task, optimizer), wait=is_last)
                last_save = time.monotonic()
            _raise_if_stopped(agreed.stops, step + 1)


class _Agreed(NamedTuple):
    """What all ranks know after a step."""

    is_writing: bool
    """Whether any rank still writes a checkpoint."""
    is_due: bool
    """Whether rank 0 wants a checkpoint."""
    stops: list[int]
    """How many signals all ranks have received, for each of `_SIGNALS`."""


def _agreed(checkpoints: Checkpoints, is_due: bool, signals: list[int]) -> _Agreed:
    """Tell all ranks what this one knows; all ranks must call it together."""
    is_wanted = is_due and is_rank_zero()
    counts = [signals.count(number) for number in _SIGNALS]
    flags = torch.tensor([checkpoints.is_writing(), is_wanted, *counts])
    num_writing, num_wanting, *stops = sum_over_ranks(flags).tolist()
    return _Agreed(num_writing > 0, num_wanting > 0, stops)


def _require_finite(metrics: Metrics, num_steps: int, checkpoints: Checkpoints) -> None:
    """End the run if a loss or the gradient of a step is not finite."""
    for name, value in metrics.items():
        if not math.isfinite(value):
            what = f"{name} is {value} at step {num_steps}."
            raise_on_all_ranks(partial(_stop, what, checkpoints))


def _tensors(task: Task, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All tensors that a resumed run needs, by name."""
    tensors = {f"task.{name}": tensor for name, tensor in task.state().items()}
    for name, parameter in parameters_of(optimizer).items():
        tensors[f"parameter.{name}"] = parameter.detach()
        for moment, tensor in optimizer.state[parameter].items():
            tensors[f"{moment}.{name}"] = tensor
    return tensors


def _raise_if_stopped(stops: list[int], num_steps: int) -> None:
    """End the run if any rank has received a signal; `stops` is that of `_Agreed`."""
    for number, num_received in zip(_SIGNALS, stops, strict=True):
        if num_received:
            text = f"{number.name} stopped the run after step {num_steps}, now saved"
            raise Interrupted(number, text)


def _stop(what: str, checkpoints: Checkpoints) -> None:
    """Raise the error that ends a run whose loss or gradient is bad."""
    checkpoints.finish()
    last = checkpoints.newest()
    saved = "There is no checkpoint yet" if last is None else f"The last good checkpoint is {last}"
    raise UserError(f"{what} {saved}. Start again with a lower lr or max_grad_norm.")


def adamw(task: Task) -> torch.optim.AdamW:
    """AdamW whose groups store their `peak_lr`, with moments allocated for a checkpoint to fill."""
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
    parameters = dict[str, Tensor]()
    for group in optimizer.param_groups:
        parameters |= zip(group["param_names"], group["params"], strict=True)
    return parameters


def cosine_with_warmup(step: int, *, total_steps: int, warmup_steps: int) -> float:
    """Factor on the peak learning rate: linear from 1/warmup_steps to 1, then half a cosine to 0.

    Example:
        >>> [round(cosine_with_warmup(s, total_steps=4, warmup_steps=2), 2) for s in range(4)]
        [0.5, 1.0, 1.0, 0.5]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * progress))


def global_norm(optimizer: torch.optim.Optimizer) -> Tensor:
    """Euclidean norm of all gradients, over all ranks; the same on each. Shape []."""
    grads = [p.grad for p in parameters_of(optimizer).values() if p.grad is not None]
    return full_tensor(get_total_norm(grads))


def update(optimizer: torch.optim.Optimizer, max_norm: float, norm: Tensor, factor: float) -> None:
    """Clip gradients to `max_norm`, take a step at `factor` of the peak rates, and discard them."""
    clip_grads_with_norm_(parameters_of(optimizer).values(), max_norm, norm)
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Within this context, signals that stop are recorded, not raised; ignored ones stay ignored.

    A terminal that closes sends SIGHUP, which `nohup` ignores.

    A second SIGINT interrupts at once, except under torchrun: one Ctrl-C reaches its ranks twice,
    from the terminal and from torchrun. Only the main thread has handlers; others record nothing.
    """
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if received and number == signal.SIGINT and num_ranks() == 1:
            raise KeyboardInterrupt
        received.append(number)

    is_main = threading.current_thread() is threading.main_thread()
    previous = {number: signal.getsignal(number) for number in _SIGNALS if is_main}
    try:
        for number, handler in previous.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, handle)
        yield received
    finally:
        for number, handler in previous.items():
            if handler is not None:  # else no handler of Python's, so none that it can set again
                signal.signal(number, handler)
