"""Tasks small enough to train in milliseconds."""

import json

import torch
from torch import nn

from dotmoe.training.loop import Schedule, TrainingConfig

SCHEDULE = Schedule(steps=12, warmup_steps=3, weight_decay=0.01, max_grad_norm=1.0)
EVERY_5 = TrainingConfig(checkpoint_every=5)


class Regression:
    """Least squares with data that depend on the step alone, and a state of its own.

    `events` maps a step to what happens in it: called with the task, after the backward pass.
    """

    schedule, micro_batch_size = SCHEDULE, 1

    def __init__(self, events=None):
        self.weight = nn.Parameter(torch.zeros(4))
        self.seen = torch.zeros((), dtype=torch.int64)
        self.events = events or {}

    def parameter_groups(self):
        return [{"params": [("weight", self.weight)], "lr": 0.1}]

    def accumulate_gradients(self, step):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        loss = (x @ self.weight - x.sum(dim=1)).square().mean() + 0.001 * self.seen
        loss.backward()
        self.seen = self.seen + 1
        metrics = {"loss": loss.item()}
        return self.events[step](self, metrics) or metrics if step in self.events else metrics

    def state(self):
        return {"seen": self.seen}

    def forget_step(self):
        pass


def interrupt(task, metrics):
    raise KeyboardInterrupt


def metrics_in(folder):
    """What was logged of each step, without times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: v for name, v in line.items() if name != "seconds"} for line in lines]


def warnings_in(caplog):
    """What our own loggers have warned of."""
    return [record.message for record in caplog.records if record.name.startswith("dotmoe")]
