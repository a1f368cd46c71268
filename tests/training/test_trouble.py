"""Losses and gradients that are not finite: the run stops, and says where it goes on."""

import math

import pytest
from toy_tasks import metrics_in, trained

from dotmoe.common.errors import UserError


def not_a_number(task, metrics):
    return {"loss": math.nan}


def spoil_gradient(task, metrics):
    task.weight.grad[2] = math.inf


PATTERNS = {
    not_a_number: r"loss is nan at step 12\.",
    spoil_gradient: r"grad_norm is (inf|nan) at step 12\.",
}


@pytest.mark.parametrize("event", PATTERNS)
def test_a_bad_loss_stops_and_names_the_last_checkpoint(event, tmp_path):
    with pytest.raises(UserError, match=PATTERNS[event]) as error:
        trained(tmp_path, {11: event})
    assert "\n" not in str(error.value)
    assert f"good checkpoint is {tmp_path / 'checkpoints' / 'step_00000010'}" in str(error.value)
    assert "a lower lr or max_grad_norm" in str(error.value)
    assert [line["step"] for line in metrics_in(tmp_path)] == list(range(1, 12))
