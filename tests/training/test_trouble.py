"""Losses that are not finite or explode, and out of memory. Oracles: the same run without the bad
batch, and with the micro-batch that fits from the start.
"""

import logging
import math

import pytest
import torch
from toy_tasks import EVERY_5, SCHEDULE, Regression, interrupt, metrics_in, warnings_in

from dotmoe.errors import UserError
from dotmoe.training import loop
from dotmoe.training.loop import LossWatch, TrainingConfig, adamw, train

SKIP = TrainingConfig(checkpoint_every=5, on_bad_loss="skip")


def not_a_number(task, metrics):
    return {"loss": math.nan}


def spoil_gradient(task, metrics):
    task.weight.grad[2] = math.inf


def exploded(task, metrics):
    return {"loss": 1e6}


PATTERNS = {
    not_a_number: "loss is nan at step 12; the largest gradient is that of weight",
    spoil_gradient: "grad_norm is (inf|nan) at step 12; the first gradient that is not finite",
    exploded: r"loss is 1e\+06, where the median of the last 11 is [\d.]+, at step 12",
}


@pytest.mark.parametrize("event", PATTERNS)
def test_a_bad_loss_stops_and_names_the_last_checkpoint(event, tmp_path):
    with pytest.raises(UserError, match=PATTERNS[event]) as error:
        train(Regression({11: event}), tmp_path, EVERY_5)
    assert "\n" not in str(error.value)
    assert f"last good one is {tmp_path / 'checkpoints' / 'step_00000010'}" in str(error.value)
    assert "--on-bad-loss skip" in str(error.value)
    assert [line["step"] for line in metrics_in(tmp_path)] == list(range(1, 12))


@pytest.mark.parametrize("event", PATTERNS)
def test_a_skipped_batch_leaves_everything_as_it_was(event, tmp_path, caplog):
    weights = []

    def watched(task, metrics):
        weights.append(task.weight.detach().clone())
        return event(task, metrics) if len(weights) == 1 else None

    task = Regression({9: watched, 10: watched})
    with caplog.at_level(logging.WARNING):
        train(task, tmp_path, SKIP)
    assert torch.equal(*weights)
    assert task.seen == SCHEDULE.steps - 1
    (warning,) = warnings_in(caplog)
    assert "at step 10" in warning
    assert "skipped" in warning


def test_skipping_and_resuming_counts_on(tmp_path):
    bad = {4: not_a_number, 6: not_a_number}
    with pytest.raises(KeyboardInterrupt):
        train(Regression({**bad, 8: interrupt}), tmp_path, SKIP)
    train(Regression(bad), tmp_path, SKIP)
    lines = metrics_in(tmp_path)
    assert [line["skipped"] for line in lines] == [0] * 4 + [1] * 2 + [2] * 6
    assert lines[4]["loss"] is None


def test_too_many_skipped_in_a_row_stop(tmp_path):
    few = TrainingConfig(on_bad_loss="skip", max_skipped=2)
    train(Regression({3: not_a_number, 4: not_a_number, 6: not_a_number}), tmp_path, few)
    (tmp_path / "more").mkdir()
    bad = dict.fromkeys((3, 4, 5), not_a_number)
    with pytest.raises(UserError, match=r"at step 6.* 2 batches before it were skipped in a row"):
        train(Regression(bad), tmp_path / "more", few)


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


class Hungry(Regression):
    """Of 8 rows more than `fits` at once do not fit from step 3 on."""

    def __init__(self, size, fits):
        super().__init__()
        self.micro_batch_size, self.fits = size, fits

    def accumulate_gradients(self, step):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        self.seen = self.seen + 1
        total = 0.0
        for rows in x.split(self.micro_batch_size):
            loss = (rows @ self.weight - rows.sum(dim=1)).square().sum() / 8
            loss.backward()
            if step >= 3 and self.micro_batch_size > self.fits:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore")
            total += loss.item()
        return {"loss": total}


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


def test_moments_are_in_memory_before_the_first_batch(tmp_path, monkeypatch):
    """So that the micro-batch is halved until it fits beside them."""
    made, moments = [], []

    def remembered(task):
        made.append(adamw(task))
        return made[0]

    def look(task, metrics):
        moments.append(made[0].state[task.weight]["exp_avg_sq"].numel())

    monkeypatch.setattr(loop, "adamw", remembered)
    train(Regression({0: look}), tmp_path)
    assert moments == [4]


def test_the_place_is_looked_for_by_all_ranks_together(tmp_path, monkeypatch):
    """Finding it communicates, and what may fail on one rank alone must not."""
    alone, places = [], []

    def on_each(make):
        alone.append(True)
        result = make()
        alone.pop()
        return result

    def place(optimizer):
        places.append(bool(alone))
        return "somewhere"

    monkeypatch.setattr(loop, "raise_on_all_ranks", on_each)
    monkeypatch.setattr(loop, "_worst_place", place)
    train(Regression({3: not_a_number}), tmp_path, SKIP)
    assert places == [False]
