"""The planner's memory beside that of the steps themselves, run on fake tensors at 7B width."""

import importlib
import sys
from pathlib import Path

import jaxtyping
import pytest

from runs import on_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
benchmark = importlib.import_module("simulated_memory")

STEPS = benchmark.of_each_kind(layers=2)
QUICK = (0, 3, 5, 6, 9, 10, 12, 13)
"""Each kind once, half of them with checkpointing."""


def require_a_plan_within_15_percent(step):
    jaxtyping.config.update("jaxtyping_disable", True)  # fake tensors are of no type
    simulated = benchmark.simulated(step)
    assert benchmark.planned(step) == pytest.approx(simulated, rel=0.15), step


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in range(len(STEPS))],
)
def test_the_peak_of_a_step_at_7b_width_is_planned_within_15_percent(number):
    on_ranks(1, require_a_plan_within_15_percent, STEPS[number])  # in a fork, which it patches
