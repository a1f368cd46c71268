import itertools
import math
from functools import partial

import numpy as np
import ot
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from dotmoe.method.transport import balanced_plan, greedy_assignment, newton, sinkhorn
from runs import affinity

SHAPES = [(128, 16), (24, 6), (40, 2), (30, 30), (7, 1)]
WIDER_SHAPES = [(512, 16), (2960, 148), (1280, 10), (128, 128), (999, 27)]


def one_hot(wanted_N, num_experts):
    return 1e4 * torch.nn.functional.one_hot(wanted_N, num_experts).double()


def adversaries(N, E):
    generator = torch.Generator().manual_seed(1)
    anyone = torch.randint(0, E, (N,), generator=generator)
    for std in (0.01, 0.1, 1.0, 3.0, 10.0):
        yield f"normal {std}", affinity(N, E, std=std)
    yield "constant", torch.full((N, E), 7.0)
    yield "balanced one-hot", one_hot(torch.arange(N) % E, E)
    yield "unbalanced one-hot", one_hot(anyone, E)
    yield "all want expert 0", one_hot(torch.zeros(N, dtype=torch.long), E)
    yield "half want expert 0", one_hot(torch.where(torch.arange(N) < N // 2, 0, anyone), E)
    mixed = one_hot(torch.zeros(N, dtype=torch.long), E)
    mixed[N // 2 :] = 0.0
    yield "half want expert 0, half nothing", mixed
    yield "signs", 1e4 * affinity(N, E).sign()
    yield "equal rows", affinity(1, E, std=3.0).expand(N, E)
    yield "four kinds of row", affinity(4, E, std=3.0).repeat(math.ceil(N / 4), 1)[:N]
    popular = affinity(N, E, std=0.5)
    popular[:, : min(10, (E + 1) // 2)] += 50.0
    yield "ten wanted by everyone", popular
    unpopular = affinity(N, E)
    unpopular[:, 0] -= 1e4
    yield "one wanted by nobody", unpopular
    yield "low rank", 3.0 * affinity(N, 3) @ affinity(3, E, seed=1)
    yield "rows of every scale", affinity(N, E) * torch.logspace(-3, 3, N).unsqueeze(-1)


@pytest.mark.parametrize(
    ("shapes", "taus"),
    [
        (SHAPES, (1.0, 0.1, 0.003)),
        pytest.param(
            SHAPES + WIDER_SHAPES,
            (10.0, 1.0, 0.3, 0.1, 0.05, 0.02, 0.001),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_adversary_is_balanced(shapes, taus):
    for N, E in shapes:
        cases = list(adversaries(N, E))
        for tau, dtype in itertools.product(taus, (torch.float32, torch.float64)):
            batch = torch.stack([case for _, case in cases]).to(dtype)
            result = balanced_plan(batch, capacity=N // E, tau=tau)
            solved = result.entries.double()
            column_error = (solved.sum(dim=-2) * E / N - 1.0).abs().amax(dim=-1)
            row_error = (solved.sum(dim=-1) - 1.0).abs().amax(dim=-1)
            for (name, _), column, row in zip(cases, column_error, row_error, strict=True):
                where = f"{name}, N {N}, E {E}, tau {tau}, {dtype}"
                # Not `column > 1e-5`: NaN must fail.
                assert column <= 1e-5, f"columns off by {column:.1e}: {where}"
                assert row <= 1e-6, f"rows off by {row:.1e}: {where}"
            assert bool(torch.isfinite(result.potential).all())
            torch.testing.assert_close(result.marginal_error, column_error, atol=5e-7, rtol=1e-3)


@pytest.mark.parametrize("room", [[10] * 6, [5, 5, 5, 5, 5, 35]])
@pytest.mark.parametrize(("std", "tau"), [(0.01, 0.1), (1.0, 1.0), (1.0, 0.2), (3.0, 0.5)])
def test_the_plan_is_that_of_pot_and_of_many_sweeps(std, tau, room):
    A = affinity(60, 6, std=std)
    sums, until = (np.ones(60), np.array(room, float)), {"numItermax": 50_000, "stopThr": 1e-11}
    expected = ot.bregman.sinkhorn_log(*sums, -A.numpy(), reg=tau, **until)
    result = balanced_plan(A, capacity=room, tau=tau, tolerance=1e-10)
    np.testing.assert_allclose(result.entries.numpy(), expected, atol=1e-8)
    single = balanced_plan(A.float(), capacity=room, tau=tau)
    np.testing.assert_allclose(single.entries.numpy(), expected, atol=2e-6)
    sweeps = sinkhorn(A, capacity=room, tau=tau, num_sweeps=2000)
    np.testing.assert_allclose(sweeps.entries.numpy(), expected, atol=1e-8)


def test_the_potential_reproduces_the_plan():
    cases = [(affinity(256, 16, std=0.1), 0.1), (affinity(256, 16, std=3.0), 0.1)]
    # Two in three want expert 0, and 1e4 / 0.3 is no float32: such logits are formed in float64.
    cases += [(one_hot((torch.arange(256) % 48 - 32).clamp_min(0), 16), 0.3)]
    for A, tau in cases:
        result = balanced_plan(A.float(), capacity=16, tau=tau)
        expected = torch.softmax(A.float().double() / tau + result.potential, dim=-1)
        # Logits of 100 in float32 are rounded by 4e-6.
        torch.testing.assert_close(result.entries.double(), expected, atol=1e-5, rtol=1e-5)


def test_the_cost_approaches_the_exact_assignment_as_tau_falls():
    A = affinity(48, 6)
    rows, columns = linear_sum_assignment(-A.repeat_interleave(8, dim=1).numpy())
    best = float(A[rows, columns // 8].sum())
    gaps = []
    for tau in (0.3, 0.1, 0.03, 0.01, 0.003):
        solved = balanced_plan(A, capacity=8, tau=tau, tolerance=1e-9).entries
        gaps.append(best - float((solved * A).sum()))
        # The entropy of a plan is at most N log E, which bounds what tau can cost.
        assert -1e-6 <= gaps[-1] <= tau * 48 * math.log(6)
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 1e-3


def test_a_start_from_the_step_before_takes_few_passes():
    A = affinity(2960, 148, std=1.0).float()
    potential = balanced_plan(A, capacity=20, tau=0.1).potential
    passes = []
    for step in range(5):
        # What AdamW does to A in one step: every entry moves by about the learning rate.
        A = A + 1e-3 * affinity(2960, 148, seed=step + 1).float().sign()
        result = balanced_plan(A, capacity=20, tau=0.1, start=potential)
        assert float(result.marginal_error) <= 1e-6
        potential = result.potential
        passes.append(result.num_passes)
    assert max(passes) <= 3
    # One pass, or by a machine's arithmetic a second one.
    assert balanced_plan(A, capacity=20, tau=0.1, start=potential).num_passes <= 2
    useless = balanced_plan(A, capacity=20, tau=0.1, start=potential * torch.nan)
    assert float(useless.marginal_error) <= 1e-6


@pytest.mark.parametrize("std", [0.01, 0.3, 3.0, 300.0])
def test_blocks_do_not_change_the_plan(std, monkeypatch):
    A = affinity(5, 64, 8, std=std).float().requires_grad_()
    weight = affinity(5, 64, 8, seed=1).float()
    whole = balanced_plan(A, capacity=8, tau=0.1)
    (gradient,) = torch.autograd.grad((whole.entries * weight).sum(), A)
    # Blocks of 12 neurons, the last one shorter.
    monkeypatch.setattr(newton, "CACHED_ELEMENTS", 100)
    parts = balanced_plan(A, capacity=8, tau=0.1)
    assert parts.num_passes == whole.num_passes
    # Without AVX the sums of blocks differ by 3e-6 in a saturated plan.
    torch.testing.assert_close(parts.entries, whole.entries, atol=1e-5, rtol=1e-5)
    (again,) = torch.autograd.grad((parts.entries * weight).sum(), A)
    # A saturated plan has next to no gradient: rounding is all that is left of it.
    torch.testing.assert_close(again, gradient, atol=1e-5, rtol=1e-4)


def test_sharp_plans_stay_far_from_denormals():
    # Arithmetic on denormals is a hundred times slower on a CPU.
    for std in (3.0, 30.0, 1e4):
        sharp = balanced_plan(affinity(512, 16, std=std).float(), capacity=32, tau=0.1).entries
        assert float(sharp.min()) > 1e-26
        assert (sharp.sum(dim=-1) - 1.0).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("bad", "options", "message"),
    [
        (torch.zeros(5, 2), {}, "5 neurons do not fill 2 experts of 2"),
        (torch.zeros(4, 2), {"capacity": torch.tensor([4, 0])}, "do not fill"),
        (torch.full((4, 2), torch.inf), {}, "infinity"),
        (torch.tensor([[0.0, torch.nan]] * 4), {}, "NaN"),
    ],
)
def test_impossible_problems_are_refused(bad, options, message):
    solvers = (partial(balanced_plan, tau=0.1), partial(sinkhorn, tau=0.1), greedy_assignment)
    for solver in solvers:
        with pytest.raises(ValueError, match=message):
            solver(bad, **{"capacity": 2, **options})
