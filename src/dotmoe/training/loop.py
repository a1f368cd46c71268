"""The loop: rate, gradient, clip, step, log, save. What is learned is the task's affair."""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from dotmoe.errors import UserError
from dotmoe.training.checkpoint import load_checkpoint, save_checkpoint
from dotmoe.training.optimizer import (
    ParameterGroup,
    adamw,
    cosine_with_warmup,
    set_learning_rates,
)

Metrics = dict[str, float]


class Task(Protocol):
    """What the loop trains."""

    def parameter_groups(self) -> Sequence[ParameterGroup]:
        """Parameters with their peak learning rates."""
        ...

    def accumulate_gradients(self, step: int) -> Metrics:
        """Forward and backward of one optimizer step (all its micro-batches), as a pure function of
        the parameters, `step` and the task's own state.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Whatever besides parameters and optimizer a resumed run needs."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Inverse of `state`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """How long and how hard to train."""

    steps: int
    warmup_steps: int
    weight_decay: float
    max_grad_norm: float
    checkpoint_every: int
    """Steps between checkpoints."""


def train(
    task: Task,
    schedule: Schedule,
    folder: Path,
    on_step: Callable[[int, Metrics], None] = lambda step, metrics: None,
) -> None:
    """Train to `schedule.steps`, from the checkpoint in `folder` if it has one.

    Writes `metrics.jsonl` (one object a step) and `checkpoint.pt`. On one CPU thread count, a run
    that was killed and resumed ends bit-identical to one that was not.

    Raises:
        UserError: The loss is no longer finite; the last checkpoint stays as it was.
    """
    groups = task.parameter_groups()
    parameters = [p for group in groups for p in group.parameters]
    optimizer = adamw(groups, weight_decay=schedule.weight_decay)
    checkpoint = folder / "checkpoint.pt"
    first_step = _resume(task, parameters, optimizer, checkpoint)
    metrics_file = folder / "metrics.jsonl"
    _keep_steps_before(metrics_file, first_step)
    with metrics_file.open("a") as log:
        for step in range(first_step, schedule.steps):
            started = time.perf_counter()
            factor = cosine_with_warmup(
                step, total_steps=schedule.steps, warmup_steps=schedule.warmup_steps
            )
            set_learning_rates(optimizer, factor)
            metrics = task.accumulate_gradients(step)
            norm = torch.nn.utils.clip_grad_norm_(parameters, schedule.max_grad_norm)
            metrics |= {"grad_norm": float(norm), "lr_factor": factor}
            _require_finite(metrics, step, checkpoint)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            metrics["seconds"] = time.perf_counter() - started
            log.write(json.dumps({"step": step + 1, **metrics}) + "\n")
            log.flush()
            on_step(step + 1, metrics)
            if (step + 1) % schedule.checkpoint_every == 0 or step + 1 == schedule.steps:
                _save(task, parameters, optimizer, step + 1, checkpoint)


def _save(
    task: Task,
    parameters: Sequence[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    step: int,
    checkpoint: Path,
) -> None:
    save_checkpoint(
        checkpoint,
        {
            "step": step,
            "parameters": [p.detach() for p in parameters],
            "optimizer": optimizer.state_dict(),
            "task": task.state(),
        },
    )


def _resume(
    task: Task,
    parameters: Sequence[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    checkpoint: Path,
) -> int:
    saved = load_checkpoint(checkpoint)
    if saved is None:
        return 0
    with torch.no_grad():
        for parameter, value in zip(parameters, saved["parameters"], strict=True):
            parameter.copy_(value)
    optimizer.load_state_dict(saved["optimizer"])
    task.restore(saved["task"])
    step: int = saved["step"]
    return step


def _keep_steps_before(metrics_file: Path, first_step: int) -> None:
    """Drop metrics of steps that will be taken again, and a line cut short by a kill."""
    if not metrics_file.exists():
        return
    kept = []
    for line in metrics_file.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= first_step:
                kept.append(line + "\n")
        except (json.JSONDecodeError, KeyError):
            break
    metrics_file.write_text("".join(kept))


def _require_finite(metrics: Metrics, step: int, checkpoint: Path) -> None:
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise UserError(
                f"{name} is {value} at step {step + 1}. Lower lr, or raise max_grad_norm's "
                f"protection by lowering it; the last good state is in {checkpoint}."
            )
