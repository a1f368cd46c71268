"""The one place where neurons are assigned, which every command calls."""

import pytest
import torch

from dotmoe.common.errors import UserError
from dotmoe.method import assignment
from dotmoe.method.align import Alignment, align
from dotmoe.method.assignment import assigned, assignment_plan
from dotmoe.method.calibrate import calibrate
from dotmoe.method.config import AlignConfig, AssignmentConfig, CalibrateConfig
from dotmoe.method.extract import extract
from dotmoe.method.granularity import Granularity
from dotmoe.method.transport import TransportPlan
from dotmoe.run.config import recipe
from runs import random_blocks

SPLIT = Granularity(num_experts=6, expert_size=16, active_experts=2)
OURS = AssignmentConfig(solver="sinkhorn")
"""`by_number` stands in for this solver."""


def by_number(affinity, *, capacity, tau):
    """Neuron n goes to expert n // s whatever its affinities, which get a gradient all the same."""
    units, columns = affinity.shape[-2:]
    expert_N = torch.arange(units) // (units // columns)
    plan = torch.nn.functional.one_hot(expert_N, columns).to(affinity).expand(affinity.shape)
    zeros = torch.zeros(affinity.shape[:-2], dtype=torch.float64)
    return TransportPlan(
        entries=plan + 0 * affinity,
        potential=affinity.new_zeros(*affinity.shape[:-2], columns),
        marginal_error=zeros,
        num_passes=1,
    )


def test_a_new_solver_decides_in_the_start_in_every_step_and_in_the_extraction(
    dense, tmp_path, monkeypatch
):
    monkeypatch.setattr(assignment, "sinkhorn", by_number)
    blocks, by_numbers = random_blocks(20), [n // 16 for n in range(96)]
    start = CalibrateConfig(calibration_tokens=200)
    state = calibrate(dense, blocks, SPLIT, start, OURS, seed=0)
    layout = extract(state, SPLIT, AssignmentConfig())  # of our start, by another solver
    assert layout.expert_of_neuron_LN.tolist() == [by_numbers] * 2

    state = calibrate(dense, blocks, SPLIT, start, AssignmentConfig(), seed=0)
    plain = extract(state, SPLIT, AssignmentConfig())
    assert plain.expert_of_neuron_LN.tolist() != [by_numbers] * 2
    assert extract(state, SPLIT, OURS).expert_of_neuron_LN.tolist() == [by_numbers] * 2

    config = AlignConfig(steps=2, batch_size=2, micro_batch_size=2, max_epochs=100.0)
    task = Alignment(dense, blocks, (state,), (SPLIT,), config, OURS, seed=0)
    align(task, tmp_path)
    assert task.parts[0].masking.expert_of_neuron_LN.tolist() == [by_numbers] * 2


@pytest.mark.parametrize("solver", ["newton", "sinkhorn"])
def test_affinities_of_any_scale_are_assigned_alike(solver):
    config = AssignmentConfig(solver=solver)
    affinity = torch.randn(24, 4)
    expert_N = assigned(config, affinity, 6)
    assert torch.equal(expert_N, assigned(config, 2.0**20 * affinity, 6))
    plan = assignment_plan(config, affinity, 6, 0.1 * float(affinity.std())).entries
    alone = plan.amax(dim=1) > 0.99  # what a plan leaves no choice about
    assert torch.equal(expert_N[alone], plan.argmax(dim=1)[alone])
    assert assigned(config, torch.zeros(4, 2), 2).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tau_start", {}),
        ("tau_end", {}),
        ("tau_start", {"calibrate": CalibrateConfig(start="random")}),
    ],
)
def test_a_temperature_that_nothing_reads_is_refused(name, changes):
    cooled = AssignmentConfig(**{name: 0.5})
    with pytest.raises(UserError, match=f"{name.replace('_', '-')} is 0.5, but it is for --steps"):
        recipe(model="embedded", out="out", assignment=cooled, **changes)
    recipe(model="embedded", out="out", assignment=cooled, align=AlignConfig(steps=3))
    at_random = CalibrateConfig(start="random")
    recipe(assignment=AssignmentConfig(tau_end=0.5), calibrate=at_random)
