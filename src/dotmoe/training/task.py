"""What the loop trains, as the loop sees it."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.tensor import DTensor

from dotmoe.training.optimizer import ParameterGroup

Metrics = dict[str, float]


class Task(Protocol):
    """What the loop trains.

    Its parameters are plain tensors, equal on all ranks, or DTensors, of which a rank may hold no
    part.
    """

    def parameter_groups(self) -> Sequence[ParameterGroup]:
        """Parameters with their peak learning rates."""
        ...

    def accumulate_gradients(self, step: int) -> Metrics:
        """Forward and backward of one optimizer step (all its micro-batches), as a pure function of
        the parameters, `step` and the task's own state.

        On return every parameter's `.grad` is the gradient of the whole batch, over all ranks; that
        of a DTensor is a DTensor. The metrics are equal on all ranks; one is called `loss`.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Whatever besides parameters and optimizer a resumed run needs: tensors (plain ones are
        equal on all ranks), None and numbers.
        """
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Inverse of `state`; also after `accumulate_gradients` has failed halfway. Tensors may be
        on any device.
        """
        ...


@runtime_checkable
class Halvable(Protocol):
    """A task that can do with less memory."""

    def halve_micro_batch(self) -> int | None:
        """Take about half as many sequences a forward pass, from the next step on; the result stays
        the same up to the order of summation.

        Returns:
            The number now, or None: it is 1 already.
        """
        ...


def snapshot(task: Task) -> dict[str, Any]:
    """A copy of the task's state that later steps do not write into."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in task.state().items()
    }


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
