"""Exact balanced assignment, balanced k-means. Oracles: SciPy, permutations, planted clusters."""

import itertools
import sys

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from dotmoe.baselines.kmeans import balanced_kmeans, optimal_assignment
from dotmoe.errors import UserError


def scipy_cost(cost_NE):
    repeats = cost_NE.shape[0] // cost_NE.shape[1]
    square = np.repeat(cost_NE.double().numpy(), repeats, axis=1)
    rows, columns = linear_sum_assignment(square)
    return square[rows, columns].sum()


def cost_of(cost_NE, expert_N):
    return float(cost_NE.double().gather(1, expert_N[:, None]).sum())


@pytest.mark.parametrize("kind", ["normal", "counts", "skewed", "crowded"])
def test_no_assignment_is_cheaper_than_scipys(kind):
    generator = torch.Generator().manual_seed(1)
    for num_neurons, num_experts in ((12, 3), (60, 10), (90, 6)):
        cost = torch.randn(num_neurons, num_experts, generator=generator)
        if kind == "counts":
            cost = torch.randint(0, 5, cost.shape, generator=generator).float()
        elif kind == "skewed":
            cost = cost.exp() * 1e3
        elif kind == "crowded":
            cost[:, 0] -= 10  # everyone wants the first
        expert = optimal_assignment(cost)
        assert torch.bincount(expert).tolist() == [num_neurons // num_experts] * num_experts
        assert cost_of(cost, expert) == pytest.approx(scipy_cost(cost), rel=1e-9, abs=1e-9)


def test_the_smallest_case_by_all_permutations():
    cost = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    tried = set(itertools.permutations([0, 0, 1, 1, 2, 2]))
    least = min(cost_of(cost, torch.tensor(p)) for p in tried)
    assert cost_of(cost, optimal_assignment(cost)) == pytest.approx(least)


def test_without_pot_its_installation_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ot", None)
    with pytest.raises(UserError, match=r"pip install 'dotmoe\[baselines\]'"):
        optimal_assignment(torch.ones(4, 2))


def test_equal_costs_are_assigned_too():
    assert torch.bincount(optimal_assignment(torch.ones(12, 4))).tolist() == [3] * 4


def test_planted_clusters_are_found_from_any_seed():
    generator = torch.Generator().manual_seed(0)
    truth = torch.arange(5).repeat(8)[torch.randperm(40, generator=generator)]
    centres = 5 * torch.randn(5, 7, generator=generator)
    features = centres[truth] + 0.3 * torch.randn(40, 7, generator=generator)
    for seed in range(3):
        found = balanced_kmeans(
            features, 5, rounds=20, starts=4, generator=torch.Generator().manual_seed(seed)
        )  # fmt: skip
        for cluster in range(5):
            assert len(set(truth[found == cluster].tolist())) == 1
