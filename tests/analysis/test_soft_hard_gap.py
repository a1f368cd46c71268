"""How far the soft plan is from the hard assignment. Oracle: the paper's sweeps, and rows as L1."""

import pytest
import torch
import torch.nn.functional as F

from dotmoe.align import AlignConfig, Alignment
from dotmoe.data import TokenBlocks
from dotmoe.granularity import ExpertsConfig, resolve
from dotmoe.moe.assignment import AlignState, AssignmentConfig
from dotmoe.transport import greedy_assignment, sinkhorn

E, K, TAU = 12, 3, 0.5


def logged(dense, tokens, scale):
    widths = dense.widths
    generator = torch.Generator().manual_seed(1)
    state = AlignState(
        affinity_LNE=scale * torch.randn(widths.layers, widths.ffn, E, generator=generator),
        router_LED=torch.randn(widths.layers, E, widths.model, generator=generator),
        step=0,
    )
    assignment = AssignmentConfig(tau_start=TAU, tau_end=TAU)
    config = AlignConfig(batch_size=2, micro_batch_size=2)
    split = resolve(ExpertsConfig(experts=E, active_experts=K), widths.ffn)
    task = Alignment(
        dense, TokenBlocks(tokens), state, split, config, assignment, warmup_steps=0, seed=0
    )
    return state, float(task.begin(0)["soft_hard_gap"])


@pytest.mark.parametrize("scale", [0.1, 1.0, 20.0])
def test_the_gap_is_half_the_distance_of_the_rows(dense, tokens, scale):
    state, gap = logged(dense, tokens, scale)
    capacity = dense.widths.ffn // E
    plan = sinkhorn(state.affinity_LNE.double(), capacity=capacity, tau=TAU, num_sweeps=2000).plan
    hard = F.one_hot(greedy_assignment(plan, capacity=capacity), E)
    assert gap == pytest.approx(float((plan - hard).abs().sum(dim=-1).mean() / 2), abs=1e-4)


def test_the_gap_closes_where_affinities_decide(dense, tokens):
    gaps = [logged(dense, tokens, scale)[1] for scale in (0.0, 1.0, 20.0)]
    assert gaps[0] == pytest.approx(1 - 1 / E, abs=1e-5)
    assert gaps[0] > gaps[1] > gaps[2]
