"""A step that runs out of memory is taken again with a smaller micro-batch."""

import gc
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dotmoe.distributed import num_ranks
from dotmoe.errors import UserError
from dotmoe.training.gradients import discard
from dotmoe.training.task import Halvable, Metrics, Task

logger = logging.getLogger(__name__)

_REMEDY = "Lower --micro-batch-size or --seq-len, or give --activation-checkpointing."


def gradients_that_fit(
    task: Task, parameters: Sequence[nn.Parameter], step: int, before: dict[str, Any]
) -> Metrics:
    """`task.accumulate_gradients`, with the largest halved micro-batch that fits.

    Args:
        task: One that is `Halvable` gets another try; of a failed one nothing is kept.
        parameters: All of the task's.
        step: Number of the step.
        before: The task's state before the step.

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
        discard(parameters)
        task.restore(before)
        fits = _halved(task, step, cause)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _halved(task: Task, step: int, cause: str) -> int:
    fits = None
    if num_ranks() == 1 and isinstance(task, Halvable):
        fits = task.halve_micro_batch()
    if fits is None:
        raise UserError(f"out of memory at step {step + 1} ({cause}). {_REMEDY}")
    return fits
