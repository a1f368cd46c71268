"""What can go wrong in a step: a bad loss, a bad gradient, too little memory."""

import gc
import logging
import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dotmoe.distributed import full_tensor, num_ranks
from dotmoe.errors import UserError
from dotmoe.training.loggers import Metrics

if TYPE_CHECKING:
    from dotmoe.training.loop import ParameterGroup, Task

logger = logging.getLogger(__name__)

_WINDOW = 64
_ENOUGH = 8


class LossWatch:
    """Judges the metrics of each step by those of the steps before it.

    A loss explodes where it is above every loss accepted so far and above `max_ratio` times the
    median of the last 64; of the first 8 nothing but finiteness is asked. The first condition keeps
    the ordinary spikes of a loss near 0 from counting, and single ones hardly move a median.
    """

    def __init__(self, max_ratio: float) -> None:
        self._max_ratio = max_ratio
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._largest = -math.inf
        self.skipped = 0
        """Batches skipped so far."""
        self.skipped_in_a_row = 0

    def trouble_in(self, metrics: Metrics) -> str | None:
        """What is wrong with a step's metrics; None where nothing is."""
        for name, value in metrics.items():
            if not math.isfinite(value):
                return f"{name} is {value}"
        loss = metrics["loss"]
        if len(self._recent) < _ENOUGH or loss <= self._largest:
            return None
        usual = median(self._recent)
        if loss - usual <= (self._max_ratio - 1) * abs(usual):
            return None
        count = len(self._recent)
        return f"loss is {loss:.4g}, where the median of the last {count} is {usual:.4g},"

    def accept(self, loss: float) -> None:
        """Remember the loss of a step that was applied."""
        self._recent.append(loss)
        self._largest = max(self._largest, loss)
        self.skipped_in_a_row = 0

    def skip(self) -> None:
        """Count a batch that was not applied."""
        self.skipped += 1
        self.skipped_in_a_row += 1

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, as plain values."""
        return {
            "recent": list(self._recent),
            "largest": self._largest,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Inverse of `state`."""
        self._recent.extend(state["recent"])
        self._largest = state["largest"]
        self.skipped = state["skipped"]
        self.skipped_in_a_row = state["skipped_in_a_row"]


def worst_place(groups: Sequence["ParameterGroup"]) -> str:
    """Where gradients went wrong, in words; the same on all ranks, which must all ask.

    Returns:
        The first gradient that is not finite in the order of the backward pass, which runs from the
        last layer to the first; where all are finite, the largest.
    """
    places = [place for group in groups for place in _squares(group)]
    bad = [place for place in places if not math.isfinite(place[2])]
    if bad:
        what = "first gradient that is not finite"
        name, layer, _ = max(bad, key=lambda place: place[1] or 0)
    else:
        what = "largest gradient"
        name, layer, _ = max(places, key=lambda place: place[2])
    return f"the {what} is that of {name}" + ("" if layer is None else f", layer {layer}")


def _squares(group: "ParameterGroup") -> Iterator[tuple[str, int | None, float]]:
    """Name, layer if there are several, and squared norm of each gradient; last name first."""
    for name, parameter in reversed(list(group.parameters.items())):
        if parameter.grad is None:
            continue
        squares = parameter.grad.double().square()
        if group.first_layer is None:
            yield name, None, full_tensor(squares.sum()).item()
        else:
            sums = full_tensor(squares.flatten(1).sum(dim=1)).tolist()
            yield from ((name, layer, v) for layer, v in enumerate(sums, group.first_layer))


def gradients_that_fit(
    task: "Task", parameters: Sequence[nn.Parameter], step: int, before: dict[str, Any]
) -> Metrics:
    """`task.accumulate_gradients`, with the largest halved micro-batch that fits.

    Args:
        task: Of a failed try nothing is kept.
        parameters: All of the task's.
        step: Number of the step.
        before: The task's state before the step; a halved micro-batch is recorded in it.

    Raises:
        UserError: Out of memory at a micro-batch of 1, or on one of several ranks, where the others
            wait in the middle of the step.
    """
    fits: int | None = None
    while True:
        try:
            metrics = task.accumulate_gradients(step)
        except torch.OutOfMemoryError as error:
            cause = str(error).partition("\n")[0]
        else:
            if fits is not None:
                logger.warning(
                    "out of memory at step %d; micro_batch_size %d fits and is used from here on",
                    step + 1,
                    fits,
                )
            return metrics
        # Outside the except block, where the error's frames hold none of the step's tensors.
        for parameter in parameters:
            parameter.grad = None
        task.restore(before)
        fits = task.halve_micro_batch() if num_ranks() == 1 else None
        if fits is None:
            raise UserError(
                f"out of memory at step {step + 1} ({cause}). Lower --micro-batch-size or "
                "--seq-len, or give --activation-checkpointing."
            )
        before |= {name: v for name, v in task.state().items() if not isinstance(v, torch.Tensor)}
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@contextmanager
def memory_explained(place: str) -> Iterator[None]:
    """Inside, out of memory is a `UserError` that names the place."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        cause = str(error).partition("\n")[0]
        raise UserError(
            f"out of memory {place} ({cause}). A trained weight takes 16 bytes: divide them over "
            "more GPUs (torchrun, --sharding shard), or train fewer."
        ) from error
