"""What small conversions log and measure stays what it was before the step was made fast.

Machines sum in other orders, and that moves single neurons, after which numbers drift apart. So two
limits: one for the steps before that, one for all. Measured at one commit on two machines, with
ATEN_CPU_CAPABILITY=default too: before, 8e-7 (paper) and 3e-6 (default); at any step the losses by
0.09, perplexity by 0.02.
"""

import json

import pytest
from golden_conversions import GOLDEN, conversions, numbers

STEPS_BEFORE, LIMIT_BEFORE = 6, 1e-5
LOSSES = ("loss", "kl", "ce", "z", "balance")


@pytest.mark.parametrize("name", ["paper", pytest.param("default", marks=pytest.mark.slow)])
def test_losses_gradients_and_perplexity_are_the_golden_ones(name, tmp_path):
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    found = numbers(conversions(tmp_path)[name])

    assert len(found["steps"]) == len(golden["steps"]) == 12
    for number, (step, expected) in enumerate(zip(found["steps"], golden["steps"], strict=True)):
        if number < STEPS_BEFORE:
            assert step == pytest.approx(expected, rel=LIMIT_BEFORE), number
        for loss in LOSSES:
            assert step[loss] == pytest.approx(expected[loss], rel=0.15), (number, loss)
    assert found["perplexity"] == pytest.approx(golden["perplexity"], rel=0.03)
