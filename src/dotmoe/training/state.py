"""All that a training run is at the end of a step, by name: what is saved and resumed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dotmoe.errors import UserError
from dotmoe.training.bad_loss import LossWatch
from dotmoe.training.checkpoints import Checkpoints, values_of
from dotmoe.training.optimizer import MOMENTS, ParameterGroup, empty_moments
from dotmoe.training.task import Task
from dotmoe.training.tensor_files import StoredTensor, read_tensors, stored_tensors


class TrainingState:
    """Parameters, optimizer, task, and what is remembered of the losses."""

    def __init__(
        self,
        task: Task,
        groups: Sequence[ParameterGroup],
        optimizer: torch.optim.Optimizer,
        watch: LossWatch,
    ) -> None:
        self.task = task
        self.parameters: dict[str, nn.Parameter] = {
            name: parameter for group in groups for name, parameter in group.parameters.items()
        }
        self.optimizer = optimizer
        self.watch = watch

    def save(self, checkpoints: Checkpoints, step: int) -> None:
        """Write a checkpoint after `step` steps; all ranks together."""
        tensors = {f"parameter.{n}": p.detach() for n, p in self.parameters.items()}
        for name, parameter in self.parameters.items():
            for moment, tensor in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{moment}.{name}"] = tensor
        task, values = {}, {}
        for name, value in self.task.state().items():
            if isinstance(value, Tensor):
                task[f"task.{name}"] = value.detach()
            else:
                values[name] = value
        checkpoints.save(
            step, tensors | task, {"step": step, "task": values, "losses": self.watch.state()}
        )

    def resume(self, checkpoints: Checkpoints) -> int:
        """Take up the newest whole checkpoint, on any number of ranks.

        Returns:
            The steps taken before it; 0 where there is none.

        Raises:
            UserError: Every checkpoint is damaged, or it is that of other parameters.
        """
        checkpoint = checkpoints.newest()
        if checkpoint is None:
            return 0
        stored, values = stored_tensors(checkpoint), values_of(checkpoint)
        self._require_same_parameters(checkpoint, stored)
        tensors = {f"parameter.{n}": p.detach() for n, p in self.parameters.items()}
        tensors |= self._moments(stored)
        task = self._task_tensors(stored)
        read_tensors(
            tensors | {f"task.{name}": tensor for name, tensor in task.items()}, checkpoint
        )
        self.task.restore(values["task"] | task)
        self.watch.restore(values["losses"])
        step: int = values["step"]
        return step

    def _require_same_parameters(self, checkpoint: Path, stored: dict[str, StoredTensor]) -> None:
        here = {name: parameter.shape for name, parameter in self.parameters.items()}
        there = {
            name.removeprefix("parameter."): tensor.shape
            for name, tensor in stored.items()
            if name.startswith("parameter.")
        }
        if here == there:
            return
        name = next(n for n in [*here, *there] if here.get(n) != there.get(n))
        raise UserError(
            f"{checkpoint} does not fit: {name} has shape {_shape(there.get(name))} in it and "
            f"{_shape(here.get(name))} here. Delete {checkpoint.parent} to start the stage again."
        )

    def _moments(self, stored: dict[str, StoredTensor]) -> dict[str, Tensor]:
        """Room for the optimizer's state of every parameter that had one."""
        tensors = {}
        for name, parameter in self.parameters.items():
            if f"{MOMENTS[0]}.{name}" in stored:
                self.optimizer.state[parameter] = empty_moments(parameter)
                for moment, tensor in self.optimizer.state[parameter].items():
                    tensors[f"{moment}.{name}"] = tensor
        return tensors

    def _task_tensors(self, stored: dict[str, StoredTensor]) -> dict[str, Tensor]:
        """Room for the tensors of the task's state, laid out as it has them now where it does."""
        now: dict[str, Any] = self.task.state()
        tensors = {}
        for key, tensor in stored.items():
            if key.startswith("task."):
                name = key.removeprefix("task.")
                like = now.get(name)
                if isinstance(like, Tensor) and like.shape == tensor.shape:
                    tensors[name] = torch.empty_like(like)
                else:
                    tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return tensors


def _shape(shape: torch.Size | None) -> str:
    return "none" if shape is None else str(list(shape))
