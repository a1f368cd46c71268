"""Tasks small enough to train in milliseconds."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dotmoe.distributed import full_tensor
from dotmoe.training.loop import ParameterGroup, Schedule, TrainingConfig

SCHEDULE = Schedule(steps=12, warmup_steps=3, weight_decay=0.01, max_grad_norm=1.0)
EVERY_5 = TrainingConfig(checkpoint_every=5)


class Regression:
    """Least squares with data that depend on the step alone, and a state of its own.

    `events` maps a step to what happens in it: called with the task, after the backward pass.
    """

    def __init__(self, events=None):
        self.weight = nn.Parameter(torch.zeros(4))
        self.seen = torch.zeros((), dtype=torch.int64)
        self.last = None
        self.events = events or {}

    def parameter_groups(self):
        return [ParameterGroup(name="weight", parameters={"weight": self.weight}, lr=0.1)]

    def accumulate_gradients(self, step):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        loss = (x @ self.weight - x.sum(dim=1)).square().mean() + 0.001 * self.seen
        loss.backward()
        self.seen = self.seen + 1
        self.last = step
        metrics = {"loss": loss.item()}
        return self.events[step](self, metrics) or metrics if step in self.events else metrics

    def state(self):
        return {"seen": self.seen, "last": self.last}

    def restore(self, state):
        self.seen, self.last = state["seen"], state["last"]

    def halve_micro_batch(self):
        return None


class Stack:
    """A tower of L affine layers [L, 3, 3] and an output row, both sharded over ranks."""

    def __init__(self, layers=3, mesh=None):
        generator = torch.Generator().manual_seed(7)
        tower = torch.eye(3) + 0.3 * torch.randn(layers, 3, 3, generator=generator)
        row = torch.randn(3, generator=generator)
        if mesh is not None:
            tower, row = (distribute_tensor(t, mesh, [Shard(0)]) for t in (tower, row))
        self.tower, self.row = nn.Parameter(tower), nn.Parameter(row)
        self.offset = torch.zeros(3)

    def parameter_groups(self):
        return [
            ParameterGroup(name="tower", parameters={"tower": self.tower}, lr=0.05, first_layer=0),
            ParameterGroup(name="row", parameters={"row": self.row}, lr=0.02),
        ]

    def accumulate_gradients(self, step):
        """Every rank computes the whole batch and keeps its part of the gradient."""
        leaves = [full_tensor(p).detach().requires_grad_() for p in (self.tower, self.row)]
        tower, row = leaves
        x = torch.randn(16, 3, generator=torch.Generator().manual_seed(step))
        hidden = x
        for layer in tower:
            hidden = torch.tanh(hidden @ layer)
        loss = 10 * (hidden @ row + self.offset.sum() - x.sin().sum(dim=1)).square().mean()
        loss.backward()
        for parameter, leaf in zip((self.tower, self.row), leaves, strict=True):
            is_sharded = isinstance(parameter, DTensor)
            mesh = parameter.device_mesh if is_sharded else None
            grad = distribute_tensor(leaf.grad, mesh, [Shard(0)]) if is_sharded else leaf.grad
            parameter.grad = grad
        self.offset = self.offset + 1e-3
        return {"loss": loss.item()}

    def state(self):
        return {"offset": self.offset}

    def restore(self, state):
        self.offset = state["offset"]

    def halve_micro_batch(self):
        return None


def warnings_in(caplog):
    """What our own loggers have warned of."""
    return [record.message for record in caplog.records if record.name.startswith("dotmoe")]
