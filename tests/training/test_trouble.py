"""Losses that are not finite, and out of memory. Oracle: the micro-batch that fits from the start."""

import json
import logging
import math

import pytest
import torch
from toy_tasks import EVERY_5, SCHEDULE, Regression, warnings_in

from dotmoe.errors import UserError
from dotmoe.training.loop import train


def not_a_number(task, metrics):
    return {"loss": math.nan}


def spoil_gradient(task, metrics):
    task.weight.grad[2] = math.inf


@pytest.mark.parametrize(
    ("event", "pattern"),
    [(not_a_number, "loss is nan"), (spoil_gradient, "grad_norm is (inf|nan)")],
)
def test_what_is_not_finite_stops_and_names_the_last_checkpoint(event, pattern, tmp_path):
    task = Regression({11: event})
    with pytest.raises(UserError, match=f"^{pattern} at step 12. The last good one is") as error:
        train(task, tmp_path, EVERY_5)
    assert f"{tmp_path / 'checkpoints' / 'step_00000010'}. Start again with" in str(error.value)
    assert torch.isfinite(task.weight).all()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 12))


class Hungry(Regression):
    """Micro-batches of `size` rows out of 8; more than `fits` do not fit from step 3 on."""

    def __init__(self, size, fits):
        super().__init__()
        self.size, self.fits = size, fits

    def accumulate_gradients(self, step):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        self.seen = self.seen + 1
        total = 0.0
        for rows in x.split(self.size):
            loss = (rows @ self.weight - rows.sum(dim=1)).square().sum() / 8
            loss.backward()
            if step >= 3 and self.size > self.fits:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore")
            total += loss.item()
        return {"loss": total}

    def halve_micro_batch(self):
        if self.size == 1:
            return None
        self.size //= 2
        return self.size


def test_the_micro_batch_that_fits_is_found_and_said(tmp_path, caplog):
    task, fitting = Hungry(8, 2), Hungry(2, 2)
    with caplog.at_level(logging.WARNING):
        train(task, tmp_path)
    (tmp_path / "fitting").mkdir()
    train(fitting, tmp_path / "fitting")
    assert warnings_in(caplog) == [
        f"out of memory at step 4: micro_batch_size is {size} from here on" for size in (4, 2)
    ]
    assert torch.allclose(task.weight, fitting.weight, rtol=1e-5)
    assert task.seen == fitting.seen == SCHEDULE.steps  # a failed try leaves no trace


def test_where_nothing_fits_that_is_said(tmp_path):
    """The command line names the options: see `message_of`."""
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 2 GiB"):
        train(Hungry(8, 0), tmp_path)
