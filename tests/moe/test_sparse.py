"""Sparse FFNs against plain autograd and torch's own FLOP counter; whole models: `finetune`."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from dotmoe.method import sparse
from dotmoe.method.router import Routing, soft_top_k, top_k_mask
from dotmoe.method.sparse import expert_sums, make_sparse
from runs import loaded

EXPERTS, SIZE, WIDTH = 6, 16, 64


def chosen(mask, active):
    return mask.topk(active, dim=1).indices


@pytest.fixture(params=["grouped", "loop", "whole"])
def path(request, monkeypatch):
    monkeypatch.setattr(sparse, "whole_is_faster", lambda *given: request.param == "whole")
    if request.param == "loop":
        monkeypatch.setattr(sparse, "runs_grouped", lambda dtype, *widths: False)


@pytest.mark.parametrize(("surrogate", "mean"), [("softmax", False), ("soft_top_k", True)])
def test_gradients_equal_those_of_the_masked_dense_ffn(
    surrogate, mean, tiny_dense, layout_of, path
):
    dense = loaded(tiny_dense("llama"))
    layout = layout_of(dense, EXPERTS, active_experts=2)
    original = dense.family.ffn(dense.family.layers(dense.model)[0])
    routing = Routing(active_experts=2, surrogate=surrogate, mean_if_unchosen=mean)
    ffn = make_sparse(dense, layout, routing)[0]
    ffn.requires_grad_(True)
    x, direction = torch.randn(2, 40, WIDTH)
    sparse_x, masked_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    output = ffn(sparse_x)
    (output * direction).sum().backward()

    gate, up, down = (part.weight.clone().requires_grad_() for part in original[:3])
    router = layout.router_LED[0].clone().requires_grad_()
    logits = masked_x @ router.T
    hard = top_k_mask(logits, 2)
    soft = torch.softmax(logits, 1) if surrogate == "softmax" else soft_top_k(logits, 2)
    mask = hard + soft - soft.detach()

    def fill(grad):
        means = [row[runs > 0].mean() for row, runs in zip(grad, hard, strict=True)]
        return torch.where(hard > 0, grad, torch.stack(means)[:, None] * mean)

    mask.register_hook(fill)
    hidden = F.silu(masked_x @ gate.T) * (masked_x @ up.T)
    masked = (hidden * mask[:, layout.expert_of_neuron_LN[0]]) @ down.T
    (masked * direction).sum().backward()
    torch.testing.assert_close(output, masked, rtol=1e-4, atol=1e-4)
    order = layout.neurons_of_expert(0)
    for ours, expected in [
        (sparse_x, masked_x.grad),
        (ffn.router.weight_ED, router.grad),
        (ffn.gate_ESD, gate.grad[order]),
        (ffn.up_ESD, up.grad[order]),
        (ffn.down_ESD, down.grad.T[order]),
    ]:
        torch.testing.assert_close(ours.grad, expected, rtol=1e-4, atol=1e-4)


def test_gradcheck_and_an_expert_that_nobody_chose(path):
    mask = top_k_mask(torch.randn(7, 4, dtype=torch.float64) - torch.tensor([0.0, 0, 0, 1e3]), 2)
    assert mask[:, 3].sum() == 0
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(
        lambda *a: expert_sums(a[0], mask, chosen(mask, 2), *a[1:]), (x, *weights)
    )
    expert_sums(x, mask, chosen(mask, 2), *weights).sum().backward()
    assert all(weight.grad[3].abs().sum() == 0 for weight in weights)


class Blackwell(torch.autograd.Function):
    """Weights whose gradient is not zero for groups without rows (pytorch issue 172439)."""

    @staticmethod
    def forward(ctx, weight, offs):
        ctx.empty = torch.diff(offs, prepend=offs[:1] * 0) == 0
        return weight.clone()

    @staticmethod
    def backward(ctx, grad):
        grad[ctx.empty] = torch.nan
        return grad, None


def test_experts_without_tokens_have_no_gradient_on_any_gpu(monkeypatch):
    mask = top_k_mask(torch.randn(50, EXPERTS) - torch.tensor([0, 0, 1e3, 0, 0, 1e3]), 2)
    x, plain = torch.randn(50, WIDTH), F.grouped_mm

    def gradients():
        torch.manual_seed(1)
        weights = [torch.randn(EXPERTS, SIZE, WIDTH, requires_grad=True) for _ in range(3)]
        for _ in range(2):
            expert_sums(x, mask, chosen(mask, 2), *weights).sum().backward()
        assert not any(weight._backward_hooks for weight in weights)
        return [weight.grad for weight in weights]

    monkeypatch.setattr(sparse, "whole_is_faster", lambda *given: False)
    expected = gradients()
    monkeypatch.setattr(
        F, "grouped_mm", lambda x, w, offs: plain(x, Blackwell.apply(w, offs), offs=offs)
    )
    assert all(map(torch.equal, gradients(), expected))
    assert all(grad[[2, 5]].abs().sum() == 0 for grad in expected)


@pytest.mark.parametrize("active", [1, 3, 6])
def test_only_chosen_experts_are_computed(active, monkeypatch):
    monkeypatch.setattr(sparse, "whole_is_faster", lambda *given: False)
    monkeypatch.setattr(sparse, "runs_grouped", lambda dtype, *widths: False)
    x = torch.randn(50, WIDTH, requires_grad=True)
    weights = [torch.randn(EXPERTS, SIZE, WIDTH, requires_grad=True) for _ in range(3)]
    mask = top_k_mask(torch.randn(50, EXPERTS), active)
    with FlopCounterMode(display=False) as counter:
        expert_sums(x, mask, chosen(mask, active), *weights).sum().backward()
    forward = 3 * 2 * 50 * active * SIZE * WIDTH
    assert counter.get_total_flops() == 3 * forward
