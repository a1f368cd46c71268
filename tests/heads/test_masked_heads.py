"""Experts made of query heads while they are masked. Oracles: the dense model, explicit sums."""

from dataclasses import replace

import pytest
import torch

from dotmoe.method.calibrate import block_inputs
from dotmoe.method.masked import masked_by, unit_mask
from heads.families import FAMILIES, HEADS


@pytest.mark.parametrize("family", FAMILIES)
def test_each_token_is_the_dense_model_without_its_idle_heads(
    family, dense_of, layout_of, tokens_BT
):
    dense = dense_of(family, num_hidden_layers=1, **FAMILIES[family])
    layout, tokens = layout_of(dense, **HEADS), tokens_BT[:1, :12]
    layer, seen = dense.model.model.layers[0], []
    with layer.self_attn.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["hidden_states"][0]), with_kwargs=True
    ):
        dense.model(tokens)
    with masked_by(dense, layout), torch.no_grad():
        found = dense.model(tokens).logits[0]
    weight = layer.self_attn.o_proj.weight
    whole, width = weight.data, weight.shape[1] // 4
    for place in range(12):
        chosen = (layout.router_LED[0] @ seen[0][place]).argsort(descending=True)[:2].tolist()
        runs = [int(e) in chosen for e in layout.expert_of_neuron_LN[0]]
        weight.data = whole * torch.tensor(runs).repeat_interleave(width)
        with torch.no_grad():
            expected = dense.model(tokens).logits[0, place]
        torch.testing.assert_close(found[place], expected, rtol=1e-4, atol=1e-4)
    weight.data = whole
    with torch.no_grad():
        expected = dense.model(tokens).logits
        with masked_by(dense, replace(layout, active_experts=4)):
            assert torch.equal(dense.model(tokens).logits, expected)


def test_routing_and_plan_receive_the_straight_through_gradients():
    routing, plan = torch.rand(5, 3, requires_grad=True), torch.rand(4, 3, requires_grad=True)
    expert, weight = torch.tensor([2, 0, 1, 0]), torch.rand(5, 4)
    (unit_mask(routing, expert, plan) * weight).sum().backward()
    sums = torch.stack([weight[:, expert == e].sum(dim=1) for e in range(3)], dim=1)
    torch.testing.assert_close(routing.grad, sums)
    torch.testing.assert_close(plan.grad, weight.T @ routing.detach())
    assert torch.equal(unit_mask(routing, expert, None), routing[:, expert])


def test_the_energy_of_a_head_is_that_of_its_term_in_the_output(dense_of, tokens_BT):
    dense = dense_of("qwen3", head_dim=24)
    attention, seen = dense.model.model.layers[1].self_attn, []
    with attention.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0])):
        dense.model(tokens_BT)
    weight, heads = attention.o_proj.weight, seen[0].flatten(0, 1)
    terms = [heads[:, 24 * n : 24 * n + 24] @ weight[:, 24 * n : 24 * n + 24].T for n in range(4)]
    expected = torch.stack([term.square().sum(dim=1) for term in terms], dim=1)
    _, (x, energy) = ((x, e()) for x, e in block_inputs(dense, tokens_BT, "attention"))
    assert x.shape == (tokens_BT.numel(), 64)
    torch.testing.assert_close(energy, expected, rtol=1e-4, atol=1e-5)
