"""What can go wrong in a step: a bad loss, a bad gradient, too little memory."""

import gc
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dotmoe.distributed import full_tensor, num_ranks
from dotmoe.training.loggers import Metrics

if TYPE_CHECKING:
    from dotmoe.training.loop import ParameterGroup, Task

logger = logging.getLogger(__name__)

_WINDOW, _ENOUGH = 64, 8


@dataclass
class LossWatch:
    """Judges the metrics of each step by those of the steps before it; plain values.

    A loss explodes where it is above every loss accepted so far and above `max_ratio` times the
    median of the last 64; of the first 8 nothing but finiteness is asked. The first condition keeps
    the ordinary spikes of a loss near 0 from counting, and single ones hardly move a median.
    """

    recent: list[float] = field(default_factory=list)
    largest: float = -math.inf
    skipped: int = 0
    """Batches that were not applied so far."""
    skipped_in_a_row: int = 0

    def trouble_in(self, metrics: Metrics, max_ratio: float) -> str | None:
        """What is wrong with a step's metrics; None where nothing is."""
        for name, value in metrics.items():
            if not math.isfinite(value):
                return f"{name} is {value}"
        loss, count = metrics["loss"], len(self.recent)
        if count < _ENOUGH or loss <= self.largest:
            return None
        usual = median(self.recent)
        if loss - usual <= (max_ratio - 1) * abs(usual):
            return None
        return f"loss is {loss:.4g}, where the median of the last {count} is {usual:.4g},"

    def accept(self, loss: float) -> None:
        """Remember the loss of a step that was applied."""
        self.recent = [*self.recent, loss][-_WINDOW:]
        self.largest = max(self.largest, loss)
        self.skipped_in_a_row = 0


def worst_place(groups: Sequence["ParameterGroup"]) -> str:
    """Where gradients went wrong, in words; the same on all ranks, which must all ask.

    The first gradient that is not finite in the order of the backward pass, which runs from the
    last layer to the first; where all are finite, the largest.
    """
    places: list[tuple[str, int, float]] = []
    for group in groups:
        first, is_stack = group.first_layer or 0, group.first_layer is not None
        for name, parameter in reversed(list(group.parameters.items())):
            if parameter.grad is not None:
                squares = parameter.grad.double().square()
                sums = full_tensor(squares.flatten(1).sum(dim=1) if is_stack else squares.sum())
                where = f"{name}, layer " if is_stack else name
                places += ((where, n, v) for n, v in enumerate(sums.view(-1).tolist(), first))
    bad = [place for place in places if not math.isfinite(place[2])]
    name, layer, _ = max(bad or places, key=lambda place: place[1] if bad else place[2])
    what = "first gradient that is not finite" if bad else "largest gradient"
    return f"the {what} is that of {name}{layer if name.endswith(' ') else ''}"


def gradients_that_fit(
    task: "Task", parameters: Sequence[nn.Parameter], step: int, before: dict[str, Any]
) -> Metrics:
    """`task.accumulate_gradients`, with the largest halved micro-batch that fits.

    Of a failed try nothing is kept; in `before`, the task's state, a halved micro-batch is
    recorded. At a micro-batch of 1, and on one of several ranks, where the others wait in the
    middle of the step, the error is raised.
    """
    while True:
        try:
            return task.accumulate_gradients(step)
        except torch.OutOfMemoryError:
            for parameter in parameters:
                parameter.grad = None
            task.restore(before)
            fits = task.halve_micro_batch() if num_ranks() == 1 else None
            if fits is None:
                raise
        before |= {name: v for name, v in task.state().items() if not isinstance(v, torch.Tensor)}
        logger.warning(
            "out of memory at step %d: micro_batch_size is %d from here on", step + 1, fits
        )
        gc.collect()  # here, where the error's frames hold none of the step's tensors
        torch.cuda.empty_cache()
