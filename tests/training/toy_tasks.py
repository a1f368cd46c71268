"""Tasks small enough to train in milliseconds."""

import json

import torch
from torch import nn

from dotmoe.training.config import Schedule, TrainingConfig
from dotmoe.training.loop import train

SCHEDULE = Schedule(steps=12, warmup_steps=3, weight_decay=0.01, max_grad_norm=1.0)
EVERY_5 = TrainingConfig(checkpoint_every=5)


class Regression:
    """Least squares with data that depend on the step alone, and a state of its own.

    `events` maps a step to what happens in it: called with the task, after the backward pass. From
    step 3 on no more than `fits` of the 8 rows fit into memory at once.
    """

    schedule = SCHEDULE

    def __init__(self, events=None, *, micro_batch_size=8, fits=8):
        self.weight = nn.Parameter(torch.zeros(4))
        self.seen = torch.zeros((), dtype=torch.int64)
        self.events = events or {}
        self.micro_batch_size, self.fits = micro_batch_size, fits

    def parameter_groups(self):
        return [{"params": [("weight", self.weight)], "lr": 0.1}]

    def accumulate_gradients(self, step):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        self.seen = self.seen + 1
        total = 0.001 * self.seen.item()
        for rows in x.split(self.micro_batch_size):
            loss = (rows @ self.weight - rows.sum(dim=1)).square().sum() / 8
            loss.backward()
            if step >= 3 and self.micro_batch_size > self.fits:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore")
            total += loss.item()
        metrics = {"loss": total}
        return self.events[step](self, metrics) or metrics if step in self.events else metrics

    def state(self):
        return {"seen": self.seen}

    def forget_step(self):
        pass


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


def warnings_in(caplog):
    """What our own loggers have warned of."""
    return [record.message for record in caplog.records if record.name.startswith("dotmoe")]
