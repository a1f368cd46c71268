"""The loop on a toy task. Oracles: PyTorch's schedulers, and a run that was not interrupted."""

import json

import pytest
import torch
from torch import nn

from dotmoe.errors import UserError
from dotmoe.training.checkpoint import load_checkpoint
from dotmoe.training.loop import Schedule, train
from dotmoe.training.optimizer import ParameterGroup, cosine_with_warmup

SCHEDULE = Schedule(
    steps=12, warmup_steps=3, weight_decay=0.01, max_grad_norm=1.0, checkpoint_every=5
)


class Regression:
    """Least squares with data that depend on the step alone, and a state of its own."""

    def __init__(self, stop_at=None, bad_at=None):
        self.weight = nn.Parameter(torch.zeros(4))
        self.seen = 0
        self.stop_at, self.bad_at = stop_at, bad_at

    def parameter_groups(self):
        return [ParameterGroup(name="weight", parameters=[self.weight], lr=0.1)]

    def accumulate_gradients(self, step):
        if step == self.stop_at:
            raise KeyboardInterrupt
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        loss = (x @ self.weight - x.sum(dim=1)).square().mean() + 0.001 * self.seen
        loss.backward()
        self.seen += 1
        return {"loss": float("nan") if step == self.bad_at else loss.item()}

    def state(self):
        return {"seen": self.seen}

    def restore(self, state):
        self.seen = state["seen"]


def metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def test_killed_and_resumed_is_bit_identical_to_uninterrupted(tmp_path):
    whole = Regression()
    (tmp_path / "whole").mkdir()
    train(whole, SCHEDULE, tmp_path / "whole")
    (tmp_path / "cut").mkdir()
    with pytest.raises(KeyboardInterrupt):
        train(Regression(stop_at=8), SCHEDULE, tmp_path / "cut")
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')  # a line cut short by the kill
    resumed = Regression()
    train(resumed, SCHEDULE, tmp_path / "cut")
    assert torch.equal(whole.weight, resumed.weight)
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "cut")


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_checkpoint(tmp_path):
    with pytest.raises(UserError, match=r"loss is nan at step 8"):
        train(Regression(bad_at=7), SCHEDULE, tmp_path)
    assert load_checkpoint(tmp_path / "checkpoint.pt")["step"] == 5


def test_a_damaged_checkpoint_is_refused(tmp_path):
    train(Regression(), SCHEDULE, tmp_path)
    file = tmp_path / "checkpoint.pt"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match="is damaged"):
        train(Regression(), SCHEDULE, tmp_path)


def test_the_cosine_is_pytorchs():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    oracle = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    for step in range(2, 10):
        found = cosine_with_warmup(step, total_steps=10, warmup_steps=2)
        assert found == pytest.approx(oracle.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        oracle.step()
