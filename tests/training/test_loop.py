"""The loop on a toy task. Oracles: PyTorch's optimizer and schedulers, an uninterrupted run."""

import threading

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from toy_tasks import SCHEDULE, Regression, interrupt, metrics_in, trained

from dotmoe.common.errors import UserError
from dotmoe.training import folder


def test_killed_and_resumed_is_bit_identical_to_uninterrupted(tmp_path, monkeypatch):
    """The checkpoint of step 5 is written when the weights are those of step 8."""
    whole, save, stepped = trained(tmp_path / "whole"), folder.save, threading.Event()
    monkeypatch.setattr(folder, "save", lambda *all, **how: stepped.wait(60) and save(*all, **how))
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "cut", {7: lambda task, metrics: stepped.set(), 8: interrupt})
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')  # a line cut short by the kill
    resumed = trained(tmp_path / "cut", {4: interrupt})  # never reached: the checkpoint has 5 steps
    assert torch.equal(whole.weight, resumed.weight)
    assert torch.equal(whole.seen, resumed.seen)
    assert metrics_in(tmp_path / "whole") == metrics_in(tmp_path / "cut")


def test_the_steps_are_those_of_torchs_adamw_clipping_and_schedulers(tmp_path):
    plain = Regression()
    optimizer = torch.optim.AdamW([plain.weight], lr=0.1, weight_decay=0.2)
    warmup = lr_scheduler.LinearLR(optimizer, 1 / 3, total_iters=2)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=9)
    schedule = lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [SCHEDULE.warmup_steps])
    for step in range(SCHEDULE.steps):
        optimizer.zero_grad()
        plain.accumulate_gradients(step)
        nn.utils.clip_grad_norm_([plain.weight], 1.0)
        optimizer.step()
        schedule.step()
    torch.testing.assert_close(trained(tmp_path).weight, plain.weight, rtol=1e-6, atol=0)


def test_another_tasks_checkpoint_is_refused(tmp_path):
    trained(tmp_path)
    other = Regression()
    other.weight = nn.Parameter(torch.zeros(5))
    with pytest.raises(UserError, match=r"does not fit this run .*weight.*Delete"):
        trained(tmp_path, task=other)
