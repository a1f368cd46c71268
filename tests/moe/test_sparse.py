"""Sparse FFNs against the masked dense model, plain autograd, and torch's own FLOP counter."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from dotmoe.load import LoadConfig, load_dense
from dotmoe.moe import sparse
from dotmoe.moe.masked import masked_by
from dotmoe.moe.router import Routing, soft_top_k, top_k_mask
from dotmoe.moe.sparse import expert_sums, make_sparse

EXPERTS, SIZE, WIDTH = 6, 16, 64
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "granite", "olmo2", "phi3")


def sparse_copy(dense, layout, surrogate="soft_top_k"):
    twin = replace(dense, model=copy.deepcopy(dense.model))
    routing = Routing(active_experts=layout.active_experts, surrogate=surrogate)
    return twin, make_sparse(twin, layout, routing), routing


def chosen(mask, active):
    return mask.topk(active, dim=1).indices


@pytest.fixture(params=["grouped", "loop", "whole"])
def path(request, monkeypatch):
    monkeypatch.setattr(sparse, "whole_is_faster", lambda *given: request.param == "whole")
    if request.param == "loop":
        monkeypatch.setattr(sparse, "runs_grouped", lambda dtype, *widths: False)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {}) for family in FAMILIES),
        ("llama", {"shared_size": 24}),
        ("llama", {"dense_layers": 1}),
        ("llama", {"active_experts": 6}),
    ],
)
def test_sparse_model_equals_the_masked_dense_model(family, options, tiny_dense, layout_of):
    dense = load_dense(str(tiny_dense(family)), LoadConfig())
    layout = layout_of(dense, EXPERTS, **{"active_experts": 2, **options})
    tokens_BT = torch.randint(2, 250, (2, 24))
    with masked_by(dense, layout), torch.no_grad():
        expected = dense.model(input_ids=tokens_BT).logits
    plain = dense.model(input_ids=tokens_BT).logits
    twin, made, routing = sparse_copy(dense, layout)
    logits = twin.model(input_ids=tokens_BT).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=5e-5)
    assert ((expected - plain).abs().max() > 1e-2) == ("active_experts" not in options)
    routing.enabled = False
    torch.testing.assert_close(twin.model(input_ids=tokens_BT).logits, plain)
    assert len(made) == len(layout.moe_layers)
    rows, original = made[-1].dense_rows(), dense.family.ffn(dense.family.layers(dense.model)[-1])
    assert torch.equal(rows["gate"], original.gate.weight)
    assert torch.equal(rows["up"], original.up.weight)
    assert torch.equal(rows["down"], original.down.weight.T)


@pytest.mark.parametrize("surrogate", ["softmax", "soft_top_k"])
def test_gradients_equal_those_of_the_masked_dense_ffn(surrogate, tiny_dense, layout_of, path):
    dense = load_dense(str(tiny_dense("llama")), LoadConfig())
    layout = layout_of(dense, EXPERTS, active_experts=2)
    original = dense.family.ffn(dense.family.layers(dense.model)[0])
    _, made, _ = sparse_copy(dense, layout, surrogate)

    def fill(grad, hard):
        known = [row[chosen > 0].mean() for row, chosen in zip(grad, hard, strict=True)]
        return torch.stack(known)[:, None]

    x = torch.randn(40, WIDTH)
    direction = torch.randn(40, WIDTH)
    weights = [p.weight.clone().requires_grad_() for p in (original.gate, original.up)]
    weights.append(original.down.weight.clone().requires_grad_())
    router = layout.router_LED[0].clone().requires_grad_()
    masked_x, sparse_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    logits = masked_x @ router.T
    hard = top_k_mask(logits, 2)
    soft = torch.softmax(logits, 1) if surrogate == "softmax" else soft_top_k(logits, 2, 1.0)
    mask = hard + soft - soft.detach()
    mask.register_hook(lambda grad: grad * hard + fill(grad, hard) * (1 - hard))
    hidden = F.silu(masked_x @ weights[0].T) * (masked_x @ weights[1].T)
    masked = (hidden * mask[:, layout.expert_of_neuron_LN[0]]) @ weights[2].T
    (masked * direction).sum().backward()
    ffn = made[0].requires_grad_(True)
    (ffn(sparse_x) * direction).sum().backward()
    torch.testing.assert_close(sparse_x.grad, masked_x.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ffn.router.weight_ED.grad, router.grad, rtol=1e-4, atol=1e-4)
    for name, theirs in zip(("gate", "up", "down"), weights, strict=True):
        grad = theirs.grad.T if name == "down" else theirs.grad
        order = layout.neurons_of_expert(0)
        ours = getattr(ffn, f"{name}_ESD").grad
        torch.testing.assert_close(ours, grad[order], rtol=1e-4, atol=1e-4)


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
