"""The planner's memory beside that of the steps themselves, run on fake tensors at 7B width."""

import jaxtyping
import pytest
import torch

import simulated_memory as benchmark
from runs import on_ranks, slow_but

STEPS = benchmark.of_each_kind(layers=2)
QUICK = (0, 3, 9, 13)
"""Alignments, plain and divided, a finetuning that offloads, and a repair of divided weights."""
OTHERS = tuple({*range(len(STEPS))} - {*QUICK})


def require_plans_within_15_percent(numbers):
    jaxtyping.config.update("jaxtyping_disable", True)  # fake tensors are of no type
    torch.get_device_module.cache_clear()  # another test's device may have had the same name
    for step in (STEPS[number] for number in numbers):
        simulated = benchmark.simulated(step)
        assert benchmark.planned(step) == pytest.approx(simulated, rel=0.15), step


@pytest.mark.parametrize("numbers", slow_but([QUICK], [QUICK, OTHERS]))
def test_the_peaks_of_steps_at_7b_width_are_planned_within_15_percent(numbers):
    on_ranks(1, require_plans_within_15_percent, numbers)  # in a fork, which they patch
