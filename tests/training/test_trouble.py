"""Losses that are not finite or explode, and out of memory. Oracle: the same run with the
micro-batch that fits from the start.
"""

import logging
import math

import pytest
import torch
from toy_tasks import SCHEDULE, Regression, metrics_in, trained, warnings_in

from dotmoe.common.errors import UserError
from dotmoe.training import loop
from dotmoe.training.loop import LossWatch, adamw


def not_a_number(task, metrics):
    return {"loss": math.nan}


def spoil_gradient(task, metrics):
    task.weight.grad[2] = math.inf


def exploded(task, metrics):
    return {"loss": 1e6}


PATTERNS = {
    not_a_number: "loss is nan at step 12; the largest gradient is that of weight",
    spoil_gradient: "grad_norm is (inf|nan) at step 12; the first gradient that is not finite",
    exploded: r"loss is 1e\+06, but the median of the last 11 is [\d.]+, at step 12",
}


@pytest.mark.parametrize("event", PATTERNS)
def test_a_bad_loss_stops_and_names_the_last_checkpoint(event, tmp_path):
    with pytest.raises(UserError, match=PATTERNS[event]) as error:
        trained(tmp_path, {11: event})
    assert "\n" not in str(error.value)
    assert f"good checkpoint is {tmp_path / 'checkpoints' / 'step_00000010'}" in str(error.value)
    assert "a lower lr or max_grad_norm" in str(error.value)
    assert [line["step"] for line in metrics_in(tmp_path)] == list(range(1, 12))


def test_the_rule_for_an_explosion():
    watch = LossWatch()
    for loss in (14.0, 9.0, 5.0, 3.0, 2.0, 2.0, 2.0):
        watch.accept(loss)
    assert watch.trouble_in({"loss": 1e9}) is None  # too few to say
    watch.accept(2.0)
    assert watch.trouble_in({"loss": 24.9}) is None  # the median is 2.5
    assert watch.trouble_in({"loss": 25.1}) is not None
    for _ in range(64):
        watch.accept(1e-3)
    assert watch.trouble_in({"loss": 13.0}) is None  # below what the run began with
    assert watch.trouble_in({"loss": 14.1}) is not None
    assert watch.trouble_in({"loss": math.inf}) == "loss is inf"


# --- out of memory


def test_the_micro_batch_that_fits_is_found_and_said(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        task = trained(tmp_path / "halved", task=Regression(fits=2))
    fitting = trained(tmp_path / "fitting", task=Regression(micro_batch_size=2))
    assert warnings_in(caplog) == [
        f"out of memory at step 4: micro_batch_size is {size} from here on" for size in (4, 2)
    ]
    assert torch.allclose(task.weight, fitting.weight, rtol=1e-5)
    assert task.seen == fitting.seen == SCHEDULE.steps  # a failed try leaves no trace


def test_where_nothing_fits_that_is_said(tmp_path):
    """The command line names the options: see `message_of`."""
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 2 GiB"):
        trained(tmp_path, task=Regression(fits=0))


def test_moments_are_in_memory_before_the_first_batch():
    """So that the micro-batch is halved until it fits beside them."""
    optimizer = adamw(task := Regression())
    assert optimizer.state[task.weight]["exp_avg_sq"].shape == task.weight.shape


def test_the_place_is_looked_for_by_all_ranks_together(tmp_path, monkeypatch):
    """Finding it communicates, and what may fail on one rank alone must not."""
    calls = []
    monkeypatch.setattr(loop, "raise_on_all_ranks", lambda make: calls.append("apart") or make())
    monkeypatch.setattr(loop, "_worst_place", lambda optimizer: calls.append("together"))
    with pytest.raises(UserError):
        trained(tmp_path, {3: not_a_number})
    assert calls == ["together", "apart"]
