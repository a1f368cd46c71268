import pytest
import torch

from dotmoe.method.transport import balanced_plan, sinkhorn
from runs import affinity


def gradient(A, weight, solve, **options):
    leaf = A.clone().requires_grad_()
    return torch.autograd.grad((solve(leaf, **options).entries * weight).sum(), leaf)[0]


@pytest.mark.parametrize(
    ("shape", "capacity"), [((6, 3), 2), ((2, 8, 2), 4), ((4, 4), 1), ((2, 5, 3), (1, 1, 3))]
)
def test_it_is_that_of_finite_differences(shape, capacity):
    def plan(A):
        return balanced_plan(A, capacity=capacity, tau=0.5, tolerance=1e-13).entries

    assert torch.autograd.gradcheck(plan, affinity(*shape).requires_grad_())


@pytest.mark.parametrize("std", [0.01, 1.0, 2.0])
def test_it_equals_the_gradient_through_unrolled_sweeps(std):
    A, weight = affinity(96, 8, std=std), affinity(96, 8, seed=1)
    unrolled = gradient(A, weight, sinkhorn, capacity=12, tau=0.5, num_sweeps=300)
    implicit = gradient(A, weight, balanced_plan, capacity=12, tau=0.5, tolerance=1e-12)
    torch.testing.assert_close(implicit, unrolled, atol=1e-9, rtol=1e-6)
    rounded = gradient(A.float(), weight.float(), balanced_plan, capacity=12, tau=0.5)
    torch.testing.assert_close(rounded.double(), unrolled, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e3, 1e4])
def test_it_is_finite_and_bounded_for_saturated_plans(dtype, scale):
    wanted = torch.arange(48) % 6
    saturated = scale * torch.nn.functional.one_hot(wanted, 6).to(dtype)
    noisy = scale * affinity(48, 6).to(dtype)
    A = torch.stack([saturated, noisy, torch.zeros_like(noisy)])
    weight = affinity(3, 48, 6, seed=1).to(dtype)
    # |dL/dA| <= max M (1 - M) * (range of G + range of b) / tau; b stays of the order of G.
    assert gradient(A, weight, balanced_plan, capacity=8, tau=0.1).abs().max() < 100.0  # no NaN
