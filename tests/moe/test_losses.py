"""Router losses against their formulas in plain Python, and the trap of a constant balance."""

import math

import torch

from dotmoe.moe.losses import balance_loss, z_loss
from dotmoe.moe.router import top_k_mask


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


def test_even_use_gives_k_and_collapse_gives_the_number_of_experts():
    even = torch.eye(6).repeat(10, 1) * 50
    assert math.isclose(balance_loss(even, top_k_mask(even, 1)).item(), 1.0, rel_tol=1e-5)
    collapsed = torch.tensor([50.0, 50.0, 0, 0, 0, 0]).expand(60, 6)
    assert math.isclose(balance_loss(collapsed, top_k_mask(collapsed, 2)).item(), 6, rel_tol=1e-5)


def test_balance_has_a_gradient_that_lowers_skew():
    logits = torch.randn(200, 8, generator=torch.Generator().manual_seed(0)) + torch.linspace(
        0, 3, 8
    )
    before = logits.clone().requires_grad_()
    loss = balance_loss(before, top_k_mask(before, 2))
    loss.backward()
    after = logits - 100 * before.grad
    assert before.grad.abs().max() > 0
    assert balance_loss(after, top_k_mask(after, 2)) < loss
