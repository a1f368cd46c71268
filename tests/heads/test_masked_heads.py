"""Experts made of query heads while they are masked. Oracles: the dense model, token by token;
NumPy's least squares; explicit sums.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dotmoe.calibrate import block_inputs, head_energy
from dotmoe.data import TokenBlocks
from dotmoe.finetuning.repair import RepairConfig, repair
from dotmoe.granularity import parts_of
from dotmoe.layout import ExpertLayout
from dotmoe.moe.masked import masked_by, unit_mask
from heads.families import FAMILIES, head_layout


@pytest.mark.parametrize("family", FAMILIES)
def test_each_token_is_the_dense_model_without_its_idle_heads(family, dense_of, tokens_BT):
    dense = dense_of(family, num_hidden_layers=1, **FAMILIES[family])
    layout, tokens = head_layout(dense, active_experts=2), tokens_BT[:1, :12]
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
    torch.testing.assert_close(head_energy(heads, weight, 4), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "granite", "qwen2"])
def test_repair_is_the_ridge_regression_of_what_attention_lacks(family, dense_of, tmp_path):
    dense = dense_of(family, num_hidden_layers=1, **FAMILIES[family])
    layout = head_layout(dense, active_experts=2)
    text = TokenBlocks(torch.randint(2, 250, (16, 32)).int())
    found = repair(dense, layout, text, RepairConfig(repair_tokens=16 * 32), folder=tmp_path)
    layer = dense.model.model.layers[0]
    norm, output = layer.post_attention_layernorm, layer.self_attn.o_proj

    def seen(model):
        streams, heads = [], []
        with (
            norm.register_forward_pre_hook(lambda _, args: streams.append(args[0].flatten(0, 1))),
            output.register_forward_hook(lambda _, args, out: heads.append(args[0].flatten(0, 1))),
            torch.no_grad(),
        ):
            model(text.tokens_BT.long())
        return streams[0].double().numpy(), heads[0].double().numpy()

    wanted, _ = seen(dense.model)
    with masked_by(dense, layout):
        reached, inputs = seen(dense.model)
    factor = getattr(dense.config, "residual_multiplier", 1.0)
    size = (wanted**2).mean(1)
    root = np.sqrt(np.minimum(np.median(size) / size, 10))[:, None]
    z, r = inputs * root, (wanted - reached) / factor * root
    ridge = found["layers"][0]["ridge"]
    penalty = np.sqrt(ridge * (z**2).sum(0).mean()) * np.eye(z.shape[1])
    expected = np.linalg.lstsq(
        np.vstack([z, penalty]), np.vstack([r, np.zeros_like(r[: len(z.T)])])
    )
    weights = load_file(tmp_path / "model/model.safetensors")
    changed = weights["model.layers.0.self_attn.o_proj.weight"].double()
    change = changed - layer.self_attn.o_proj.weight.double()
    torch.testing.assert_close(change.T, torch.tensor(expected[0]), rtol=2e-3, atol=2e-5)
    assert found["layers"][0]["heldout_error"] < 1
    assert found["layers"][0]["target"] == "attention"
    left = [name for name in weights if not name.endswith("layers.0.self_attn.o_proj.weight")]
    same = dict(dense.model.named_parameters())
    assert all(torch.equal(weights[name], same[name]) for name in left)


def test_layouts_of_both_targets_share_a_file(dense_of, layout_of, tmp_path):
    dense = dense_of("llama")
    both = replace(layout_of(dense), beside=head_layout(dense, active_experts=2))
    both.save(tmp_path / "both")
    again = ExpertLayout.load(tmp_path / "both")
    assert again.granularity == both.granularity
    for mine, its in zip(parts_of(both), parts_of(again), strict=True):
        assert torch.equal(mine.expert_of_neuron_LN, its.expert_of_neuron_LN)
        assert torch.equal(mine.router_LED, its.router_LED)
