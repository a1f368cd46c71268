"""The reference that `benchmarks/assignment.py` is faster than is the one it says it is."""

import sys
from pathlib import Path

import pytest
import torch
from test_rounding import serial

from dotmoe.transport import sinkhorn

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in [name for name in sys.modules if name in ("assignment", "rounds")]:
        del sys.modules[name]


def test_the_reference_is_the_papers_recipe(benchmarks):
    from assignment import Paper

    A = torch.randn(60, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
    plan = Paper().plan(A, 0.3)
    expected = sinkhorn(A, capacity=10, tau=0.3, num_sweeps=50).plan
    torch.testing.assert_close(plan, expected)
    torch.testing.assert_close(
        torch.autograd.grad((plan * weight).sum(), A),
        torch.autograd.grad((expected * weight).sum(), A),
    )
    assert Paper().rounded(plan.detach()).tolist() == serial(plan.detach(), 10)


@pytest.mark.parametrize("name", ["paper", "POT", "dotmoe, cold", "dotmoe"])
def test_every_method_solves_the_same_problem(benchmarks, name):
    from assignment import METHODS, Newton, affinities, normal_profile, one_step_later, step

    profile = normal_profile(std=0.2, tau=0.2, change=1e-3)
    before = affinities(profile, 128, 8, seed=0)
    A = one_step_later(profile, before, seed=0)
    method = METHODS[name]()
    if isinstance(method, Newton) and name == "dotmoe":
        method.remember(before, 0.2)
    expected = sinkhorn(A, capacity=16, tau=0.2, num_sweeps=500).plan
    torch.testing.assert_close(method.plan(A, 0.2), expected, atol=1e-6, rtol=1e-4)
    cost = step(method, A, torch.ones_like(A), 0.2)
    assert cost["marginal_error"] < 2e-6
    assert min(cost["forward_s"], cost["backward_s"], cost["rounding_s"]) > 0
    assert ("passes" in cost) == name.startswith("dotmoe")


def test_drawn_affinities_are_as_wide_as_the_measured_ones(benchmarks):
    from assignment import affinities, one_step_later

    quantiles = torch.linspace(-1, 1, 257).pow(3) + 0.1
    profile = {
        "rest_quantiles": quantiles.tolist(),
        "row_std": 0.3,
        "column_std": 0.2,
        "change_growth": 0.1,
        "change_column_std": 0.05,
        "change_rest_std": 0.02,
    }
    A = affinities(profile, 4096, 512, seed=0)
    assert float(A.mean(dim=1).std()) == pytest.approx(0.3, rel=0.1)
    assert float(A.mean(dim=0).std()) == pytest.approx(0.2, rel=0.15)
    rest = A - A.mean(dim=1, keepdim=True) - A.mean(dim=0, keepdim=True)
    assert float(rest.std()) == pytest.approx(float(quantiles.std()), rel=0.05)
    change = one_step_later(profile, A, seed=0) - 1.1 * A
    assert float(change.mean(dim=0).std()) == pytest.approx(0.05, rel=0.15)
    assert float((change - change.mean(dim=0)).std()) == pytest.approx(0.02, rel=0.02)
