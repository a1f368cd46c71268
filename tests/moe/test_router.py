"""Routing: mask, surrogates, gradients. Oracles: sorting, SciPy, finite differences."""

import math

import pytest
import torch
from scipy.optimize import brentq
from scipy.special import expit

from dotmoe.method.router import (
    balance_loss,
    router_logits,
    soft_top_k,
    straight_through_top_k,
    top_k_mask,
    z_loss,
)


def logits(tokens=6, experts=9, dtype=torch.float64, scale=2.0):
    generator = torch.Generator().manual_seed(0)
    return scale * torch.randn(tokens, experts, generator=generator, dtype=dtype)


def test_the_mask_marks_the_k_largest_logits_of_each_token():
    values = logits()
    mask = top_k_mask(values, 4)
    for row, marked in zip(values.tolist(), mask.tolist(), strict=True):
        largest = sorted(range(len(row)), key=lambda e: -row[e])[:4]
        assert {e for e, m in enumerate(marked) if m == 1.0} == set(largest)


def test_logits_read_the_routers_own_numbers_beside_16_bit_inputs():
    """Routers are float32, and are not rounded to the dtype of the model's activations.

    Rounded to bfloat16, each product would be off by up to 2^-9 of it; in float32, a sum of 256
    terms is off by at most 256 * 2^-24 of the sum of their sizes.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 256, generator=generator).bfloat16()
    router = torch.randn(9, 256, generator=generator)
    exact, sizes = x.double() @ router.double().T, x.double().abs() @ router.double().abs().T
    found = router_logits(x, router)
    assert found.dtype == torch.float32
    assert bool(((found - exact).abs() <= 256 * 2**-24 * sizes).all())


def test_soft_rows_are_the_sigmoids_whose_sum_is_k():
    values = logits()
    for k in (1, 4, 8):
        for row, found in zip(values.numpy(), soft_top_k(values, k), strict=True):
            theta = brentq(lambda t, x=row, k=k: expit(x - t).sum() - k, -200, 200, xtol=1e-13)
            assert torch.allclose(found, torch.from_numpy(expit(row - theta)), atol=1e-7)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 30.0, 1e4])
def test_soft_rows_sum_to_k_in_float32_at_any_scale(scale):
    soft = soft_top_k(logits(64, 148, torch.float32, scale), 37)
    assert torch.isfinite(soft).all()
    assert torch.allclose(soft.sum(dim=1), torch.full((64,), 37.0), atol=1e-2)


def test_all_experts_active_gives_ones_and_no_gradient():
    values = logits().requires_grad_()
    soft = soft_top_k(values, values.shape[1])
    soft.sum().backward()
    assert bool((soft == 1).all())
    assert not values.grad.any()


def test_the_gradient_of_soft_top_k_is_that_of_finite_differences():
    values = logits(3, 6).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: soft_top_k(x, 2), (values,), atol=1e-6)


@pytest.mark.parametrize("surrogate", ["softmax", "soft_top_k"])
def test_straight_through_is_hard_forward_and_soft_backward(surrogate):
    values = logits(5, 8, torch.float32).requires_grad_()
    weights = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    mask, chosen = straight_through_top_k(values, 3, surrogate=surrogate)
    assert torch.equal(mask.detach().gather(1, chosen), torch.ones(5, 3))
    assert torch.equal(mask, top_k_mask(values, 3))
    (mask * weights).sum().backward()
    other = values.detach().clone().requires_grad_()
    soft = torch.softmax(other, dim=1) if surrogate == "softmax" else soft_top_k(other, 3)
    (soft * weights).sum().backward()
    assert torch.equal(values.grad, other.grad)


def test_router_logits_are_float32_whatever_the_inputs():
    x, router = torch.randn(4, 8).bfloat16(), torch.randn(3, 8).bfloat16()
    found = router_logits(x, router)
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), x.double() @ router.double().T, atol=1e-5)


def test_z_loss_is_the_mean_squared_logsumexp():
    rows = [[0.5, -1.0, 2.0], [3.0, 3.0, 0.0]]
    expected = sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in rows) / 2
    assert math.isclose(z_loss(torch.tensor(rows)).item(), expected, rel_tol=1e-6)


def test_balance_loss_is_the_papers_sum():
    rows = [[0.5, -1.0, 2.0], [3.0, 2.0, 0.0], [0.1, 0.2, 0.3]]
    logits = torch.tensor(rows)
    softmax = [[math.exp(v) / sum(map(math.exp, row)) for v in row] for row in rows]
    chosen = [{0, 2}, {0, 1}, {1, 2}]
    expected = 3 * sum(
        sum(e in c for c in chosen) / 3 * sum(row[e] for row in softmax) / 3 for e in range(3)
    )
    found = balance_loss(logits, top_k_mask(logits, 2)).item()
    assert math.isclose(found, expected, rel_tol=1e-6)
