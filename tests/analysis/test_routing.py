"""Routing of the masked model and its load. Oracle: the dense model with a mask, in NumPy."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dotmoe.analyse import routing
from dotmoe.analyse.outputs import sampled_outputs
from dotmoe.analyse.routing import captured_routes
from dotmoe.analyse.utilisation import load_shares, load_statistics, values, warnings_of
from dotmoe.layout import ALWAYS_ON
from dotmoe.moe.masked import masked_by

E, K = 12, 3


@pytest.fixture
def layout(dense, layout_of):
    """Random experts; the first layer stays dense."""
    made = layout_of(dense)
    made.expert_of_neuron_LN[0] = ALWAYS_ON
    return made


def inputs_of_the_last_ffn(dense, tokens):
    """The layers before it are dense here, so the dense model's own input is the masked one's."""
    seen = []
    last = dense.family.layers(dense.model)[-1].mlp
    hook = last.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    with torch.no_grad():
        dense.model(input_ids=tokens)
    hook.remove()
    return seen[0].flatten(0, 1)


def test_routes_are_the_largest_logits_of_every_token(dense, layout, tokens, monkeypatch):
    monkeypatch.setattr(routing, "FORWARD_TOKENS", 72)  # three blocks a pass, the last pass of one
    x_TD = inputs_of_the_last_ffn(dense, tokens).double().numpy()
    logits_TE = x_TD @ layout.router_LED[-1].double().numpy().T
    expected_TK = np.argsort(-logits_TE, axis=1)[:, :K]
    done = []
    routes = captured_routes(dense, layout, tokens, lambda *told: done.append(told))
    assert routes.layers == (1,)
    assert np.array_equal(routes.chosen_LTK[0].numpy(), expected_TK)
    assert done == [(3, 10), (6, 10), (9, 10), (10, 10)]

    used = values(SimpleNamespace(routes=routes))
    counted = [(expected_TK == expert).any(axis=1).mean() for expert in range(E)]
    assert used["share_LE"][0] == pytest.approx(counted)
    assert sum(used["share_LE"][0]) == pytest.approx(K)


def test_a_later_layer_sees_what_the_masked_layers_before_it_give(dense, layout, tokens):
    """With k = E the masked model is the dense one; with k = 1 it is another."""
    last = layout.router_LED[-1]
    both = replace(layout, expert_of_neuron_LN=layout.expert_of_neuron_LN[[1, 1]], active_experts=E)
    dense_first = (inputs_of_the_last_ffn(dense, tokens) @ last.T).argmax(dim=1)
    everything = captured_routes(dense, both, tokens)
    assert torch.equal(everything.chosen_LTK[1, :, 0].long(), dense_first)
    one = captured_routes(dense, both.with_active_experts(1), tokens)
    assert not torch.equal(one.chosen_LTK[1, :, 0].long(), dense_first)


def test_inputs_of_single_tokens_are_picked_from_all_passes(dense, layout, tokens, monkeypatch):
    monkeypatch.setattr(routing, "FORWARD_TOKENS", 72)
    wanted = torch.tensor([0, 71, 72, 150, 239])
    found = routing.router_inputs(dense, layout, tokens, 1, wanted)
    torch.testing.assert_close(found, inputs_of_the_last_ffn(dense, tokens)[wanted])


def test_statistics_of_a_load_written_out():
    share = torch.tensor([0.8, 0.6, 0.4, 0.2], dtype=torch.float64)
    found = load_statistics(share)
    loads = share.numpy()
    portion = loads / loads.sum()
    assert found["coefficient_of_variation"] == pytest.approx(np.std(loads) / np.mean(loads))
    assert found["entropy_normalised"] == pytest.approx(
        -(portion * np.log(portion)).sum() / np.log(4)
    )
    assert (found["max_over_mean"], found["min_over_mean"]) == pytest.approx((1.6, 0.4))
    assert (found["dead_experts"], found["always_on_experts"]) == ([], [])
    assert warnings_of(3, share) == []


def test_the_same_experts_for_every_token_are_the_largest_variation_there_is():
    chosen = torch.arange(K).repeat(50, 1)
    share = load_shares(chosen, E)
    found = load_statistics(share)
    assert found["coefficient_of_variation"] == pytest.approx(math.sqrt(E / K - 1))
    assert found["dead_experts"] == list(range(K, E))
    assert found["always_on_experts"] == list(range(K))
    said = warnings_of(5, share)
    assert [line.split(":")[0] for line in said] == ["layer 5"] * 3
    assert "9 of 12 experts are dead" in said[0]
    assert "3 of 12 experts run for more than 95 %" in said[1]
    assert "1.73" in said[2]


@pytest.mark.parametrize(
    ("share", "words"),
    [
        ([0.5, 0.5, 0.5, 0.5], []),
        ([0.57] * 7 + [0.004], ["dead"]),
        ([0.96] + [0.434] * 7, ["95 %"]),
        ([0.94, 0.94, 0.06, 0.06], ["uneven"]),
        ([0.99, 0.99, 0.99, 0.83], []),  # k / E near 1: experts that always run mean nothing
        ([1.0, 1.0, 1.0, 1.0], []),
    ],
)
def test_each_rule_warns_by_itself(share, words):
    said = warnings_of(0, torch.tensor(share, dtype=torch.float64))
    assert len(said) == len(words)
    assert all(word in line for word, line in zip(words, said, strict=True))


def test_outputs_of_all_chosen_experts_add_up_to_the_masked_ffn(dense, layout, tokens):
    """Oracle: the masked model's own FFN."""
    x_TD = inputs_of_the_last_ffn(dense, tokens)[:20]
    chosen_TK = (x_TD @ layout.router_LED[-1].T).topk(K, dim=1).indices
    layer = dense.family.layers(dense.model)[-1]
    outputs = sampled_outputs(
        x_TD.repeat_interleave(K, dim=0),
        dense.family.ffn(layer),
        layout.expert_of_neuron_LN[-1],
        chosen_TK.flatten(),
    )
    with masked_by(dense, layout), torch.no_grad():
        expected = layer.mlp(x_TD)
    torch.testing.assert_close(outputs.view(20, K, -1).sum(dim=1), expected)
    assert F.cosine_similarity(outputs[0], outputs[1], dim=0) < 0.99
