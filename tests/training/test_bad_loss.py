"""Losses that are not finite or explode. Oracle: the same run without the bad batch."""

import json
import logging
import math

import pytest
import torch
from toy_tasks import EVERY_5, SCHEDULE, Regression, Stack, warnings_in

from dotmoe.errors import UserError
from dotmoe.training import loop
from dotmoe.training.loop import TrainingConfig, train
from dotmoe.training.trouble import LossWatch

SKIP = TrainingConfig(checkpoint_every=5, on_bad_loss="skip")


def not_a_number(task, metrics):
    return {"loss": math.nan}


def spoil_gradient(task, metrics):
    task.weight.grad[2] = math.inf


def exploded(task, metrics):
    return {"loss": 1e6}


@pytest.mark.parametrize(
    ("event", "pattern"),
    [
        (not_a_number, "loss is nan at step 12; the largest gradient is that of weight"),
        (
            spoil_gradient,
            "grad_norm is (inf|nan) at step 12; the first gradient that is not finite",
        ),
        (exploded, r"loss is 1e\+06, where the median of the last 11 is [\d.]+, at step 12"),
    ],
)
def test_a_bad_loss_stops_and_keeps_the_last_checkpoint(event, pattern, tmp_path):
    task = Regression({11: event})
    with pytest.raises(UserError, match=pattern) as error:
        train(task, SCHEDULE, tmp_path, EVERY_5)
    assert "\n" not in str(error.value)
    assert f"last good one is {tmp_path / 'checkpoints' / 'step_00000010'}" in str(error.value)
    assert "--on-bad-loss skip" in str(error.value)
    resumed, whole = Regression(), Regression()
    train(resumed, SCHEDULE, tmp_path, EVERY_5)
    (tmp_path / "whole").mkdir()
    train(whole, SCHEDULE, tmp_path / "whole", EVERY_5)
    assert torch.equal(resumed.weight, whole.weight)


def test_before_the_first_checkpoint_that_is_said(tmp_path):
    with pytest.raises(UserError, match="There is no checkpoint yet"):
        train(Regression({0: not_a_number}), SCHEDULE, tmp_path)


@pytest.mark.parametrize("event", [not_a_number, spoil_gradient, exploded])
def test_a_skipped_batch_leaves_everything_as_it_was(event, tmp_path, caplog):
    left = {}

    def watch_then(event):
        def happen(task, metrics):
            left["weight"], left["seen"] = task.weight.detach().clone(), task.seen - 1
            return event(task, metrics)

        return happen

    def compare(task, metrics):
        left["same"] = torch.equal(task.weight, left["weight"]) and task.seen - 1 == left["seen"]

    with caplog.at_level(logging.WARNING):
        train(Regression({9: watch_then(event), 10: compare}), SCHEDULE, tmp_path, SKIP)
    assert left["same"]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["skipped"] for line in lines] == [0] * 9 + [1] * 3
    (warning,) = warnings_in(caplog)
    assert "at step 10" in warning
    assert "skipped" in warning


def test_skipping_and_resuming_counts_on(tmp_path):
    def interrupt(task, metrics):
        raise KeyboardInterrupt

    bad = {4: not_a_number, 6: not_a_number}
    with pytest.raises(KeyboardInterrupt):
        train(Regression({**bad, 8: interrupt}), SCHEDULE, tmp_path, SKIP)
    train(Regression(bad), SCHEDULE, tmp_path, SKIP)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["skipped"] for line in lines] == [0] * 4 + [1] * 2 + [2] * 6
    assert lines[4]["loss"] is None


def test_too_many_skipped_in_a_row_stop(tmp_path):
    few = TrainingConfig(on_bad_loss="skip", max_skipped=2)
    train(Regression({3: not_a_number, 4: not_a_number, 6: not_a_number}), SCHEDULE, tmp_path, few)
    (tmp_path / "more").mkdir()
    bad = dict.fromkeys((3, 4, 5), not_a_number)
    with pytest.raises(UserError, match=r"at step 6.* 2 batches before it were skipped in a row"):
        train(Regression(bad), SCHEDULE, tmp_path / "more", few)


class OneBadLayer(Stack):
    """The backward pass overflows below one layer, as it would in too small a dtype."""

    def accumulate_gradients(self, step):
        metrics = super().accumulate_gradients(step)
        if step == 2:
            self.tower.grad[:2] = math.nan
        return metrics


def test_the_layer_is_the_one_where_the_backward_pass_went_bad(tmp_path):
    with pytest.raises(UserError, match="not finite is that of tower, layer 1"):
        train(OneBadLayer(), SCHEDULE, tmp_path)


def test_the_place_is_looked_for_by_all_ranks_together(tmp_path, monkeypatch):
    """Finding it communicates, and what may fail on one rank alone must not."""
    inside = []

    def alone(make):
        inside.append(True)
        result = make()
        inside.pop()
        return result

    def place(groups):
        assert not inside
        return "somewhere"

    monkeypatch.setattr(loop, "raise_on_all_ranks", alone)
    monkeypatch.setattr(loop, "worst_place", place)
    train(Regression({3: not_a_number}), SCHEDULE, tmp_path, SKIP)


def test_the_rule_for_an_explosion():
    watch = LossWatch(10)
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
    never = LossWatch(math.inf)
    for _ in range(10):
        never.accept(1.0)
    assert never.trouble_in({"loss": 1e30}) is None
    assert never.trouble_in({"loss": math.inf}) == "loss is inf"
