"""Losses that are not finite or explode: the run stops, and says where it goes on."""

import math

import pytest
from toy_tasks import metrics_in, trained

from dotmoe.common.errors import UserError
from dotmoe.training.loop import LossWatch


def not_a_number(task, metrics):
    return {"loss": math.nan}


def spoil_gradient(task, metrics):
    task.weight.grad[2] = math.inf


def exploded(task, metrics):
    return {"loss": 1e6}


PATTERNS = {
    not_a_number: r"loss is nan at step 12\.",
    spoil_gradient: r"grad_norm is (inf|nan) at step 12\.",
    exploded: r"loss is 1e\+06, but the median of the last 11 is [\d.]+, at step 12\.",
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
