"""The loop on a toy task. Oracles: PyTorch's schedulers, and a run that was not interrupted."""

import pytest
import torch
from torch import nn
from toy_tasks import EVERY_5, SCHEDULE, Regression, interrupt, metrics_in

from dotmoe.errors import UserError
from dotmoe.training.loop import cosine_with_warmup, train


def test_killed_and_resumed_is_bit_identical_to_uninterrupted(tmp_path):
    whole = Regression()
    (tmp_path / "whole").mkdir()
    train(whole, tmp_path / "whole", EVERY_5)
    (tmp_path / "cut").mkdir()
    with pytest.raises(KeyboardInterrupt):
        train(Regression({8: interrupt}), tmp_path / "cut", EVERY_5)
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')  # a line cut short by the kill
    resumed = Regression({4: interrupt})  # never reached: 5 steps are in the checkpoint
    train(resumed, tmp_path / "cut", EVERY_5)
    assert torch.equal(whole.weight, resumed.weight)
    assert torch.equal(whole.seen, resumed.seen)
    assert metrics_in(tmp_path / "whole") == metrics_in(tmp_path / "cut")


def test_the_steps_are_those_of_torchs_adamw_and_clipping(tmp_path):
    task = Regression()
    train(task, tmp_path)
    plain = Regression()
    optimizer = torch.optim.AdamW([plain.weight], lr=0.1, weight_decay=0.01)
    for step in range(SCHEDULE.steps):
        optimizer.param_groups[0]["lr"] = 0.1 * cosine_with_warmup(
            step, total_steps=SCHEDULE.steps, warmup_steps=SCHEDULE.warmup_steps
        )
        optimizer.zero_grad()
        plain.accumulate_gradients(step)
        nn.utils.clip_grad_norm_([plain.weight], 1.0)
        optimizer.step()
    assert torch.equal(task.weight, plain.weight)


def test_another_tasks_checkpoint_is_refused(tmp_path):
    train(Regression(), tmp_path)
    other = Regression()
    other.weight = nn.Parameter(torch.zeros(5))
    with pytest.raises(UserError, match=r"does not fit: .*weight.*Delete"):
        train(other, tmp_path)


def test_the_cosine_is_pytorchs():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    oracle = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    for step in range(2, 10):
        found = cosine_with_warmup(step, total_steps=10, warmup_steps=2)
        assert found == pytest.approx(oracle.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        oracle.step()
