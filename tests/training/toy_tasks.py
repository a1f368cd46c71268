"""Tasks small enough to train in milliseconds."""

import json

import torch
from torch import nn

from dotmoe.training.config import Schedule, TrainingConfig
from dotmoe.training.loop import train

SCHEDULE = Schedule(steps=12, warmup_steps=3, weight_decay=0.2, max_grad_norm=1.0)
EVERY_5 = TrainingConfig(checkpoint_every=5)


class Regression:
    """Least squares with data that depend on the step alone, and a state of its own.

    `events` maps a step to what happens in it: called with the task, after the backward pass.
    """

    schedule = SCHEDULE

    def __init__(self, events=None):
        self.weight = nn.Parameter(torch.zeros(4))
        self.seen = torch.zeros((), dtype=torch.int64)
        self.events = events or {}

    def parameter_groups(self):
        return [{"params": [("weight", self.weight)], "lr": 0.1}]

    def accumulate_gradients(self, step):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        self.seen = self.seen + 1
        loss = (x @ self.weight - x.sum(dim=1)).square().sum() / 8
        loss.backward()
        metrics = {"loss": 0.001 * self.seen.item() + loss.item()}
        return self.events[step](self, metrics) or metrics if step in self.events else metrics

    def state(self):
        return {"seen": self.seen}


def trained(folder, events=None, training=EVERY_5, *, task=None):
    """A task, a new regression unless given, after the loop in a folder that need not exist."""
    task = task or Regression(events)
    folder.mkdir(exist_ok=True)
    train(task, folder, training)
    return task


def interrupt(task, metrics):
    raise KeyboardInterrupt


def lines_in(folder):
    """What was logged of each step."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def metrics_in(folder):
    """The same without times."""
    return [{name: v for name, v in line.items() if name != "seconds"} for line in lines_in(folder)]
