"""`dotmoe analyse`: routing and load of a masked model. Oracle: the dense model, in NumPy."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import expert_outputs
from dotmoe.measure import analyse as module
from dotmoe.measure.analyse import captured_routes, load_of, load_statistics, warnings_of
from dotmoe.method.layout import ALWAYS_ON
from dotmoe.method.masked import masked_by
from runs import passed, random_blocks

E, K, T = 12, 3, 4000


@pytest.fixture
def tokens():
    return random_blocks(10).tokens_BT


@pytest.fixture
def layout(dense, layout_of):
    """Random experts; the first layer stays dense."""
    made = layout_of(dense)
    made.expert_of_neuron_LN[0] = ALWAYS_ON
    return made


def inputs_of_the_last_ffn(dense, tokens):
    """The layers before it are dense here, so the dense model's own input is the masked one's."""
    last = dense.family.layers(dense.model)[-1].mlp
    x_BTD, _ = passed({"": last}, lambda: dense.model(input_ids=tokens))[""]
    return x_BTD.detach().flatten(0, 1)


def test_routes_are_the_largest_logits_of_every_token(dense, layout_of, tokens, monkeypatch):
    """Also beside a shared expert, which is no part of the load."""
    layout = layout_of(dense, shared_size=12)
    layout.expert_of_neuron_LN[0] = ALWAYS_ON
    monkeypatch.setattr(module, "FORWARD_TOKENS", 72)  # three blocks a pass, the last pass of one
    x_TD = inputs_of_the_last_ffn(dense, tokens)
    logits_TE = x_TD.double().numpy() @ layout.router_LED[-1].double().numpy().T
    expected_TK = np.argsort(-logits_TE, axis=1)[:, :K]
    done = []
    routes = captured_routes(dense, (layout,), tokens, lambda *told: done.append(told))["ffn"]
    assert np.array_equal(routes.numpy(), expected_TK[None])
    assert done == [(3, 10), (6, 10), (9, 10), (10, 10)]

    used, _ = load_of(layout, routes)
    counted = [(expected_TK == expert).any(axis=1).mean() for expert in range(E)]
    assert used["layers"] == [1]
    assert used["share_LE"][0] == pytest.approx(counted)


def test_a_later_layer_sees_what_the_masked_layers_before_it_give(dense, layout, tokens):
    """With k = E the masked model is the dense one; with k = 1 it is another."""
    last = layout.router_LED[-1]
    both = replace(layout, expert_of_neuron_LN=layout.expert_of_neuron_LN[[1, 1]], active_experts=E)
    dense_first = (inputs_of_the_last_ffn(dense, tokens) @ last.T).argmax(dim=1)
    everything = captured_routes(dense, (both,), tokens)["ffn"]
    assert torch.equal(everything[1, :, 0].long(), dense_first)
    one = captured_routes(dense, (replace(both, active_experts=1),), tokens)["ffn"]
    assert not torch.equal(one[1, :, 0].long(), dense_first)


def test_outputs_of_all_chosen_experts_add_up_to_the_masked_ffn(dense, layout, tokens):
    """Oracle: the masked model's own FFN."""
    x_TD = inputs_of_the_last_ffn(dense, tokens)[:20]
    chosen_TK = (x_TD @ layout.router_LED[-1].T).topk(K, dim=1).indices
    layer = dense.family.layers(dense.model)[-1]
    ffn, own_N = dense.family.ffn(layer), layout.expert_of_neuron_LN[-1]
    outputs = expert_outputs.sampled_outputs(
        x_TD.repeat_interleave(K, dim=0), ffn, own_N, chosen_TK.flatten()
    )
    with masked_by(dense, layout), torch.no_grad():
        expected = layer.mlp(x_TD)
    torch.testing.assert_close(outputs.view(20, K, -1).sum(dim=1), expected)
    assert F.cosine_similarity(outputs[0], outputs[1], dim=0) < 0.99


def test_statistics_of_a_load_written_out():
    loads = np.array([0.8, 0.6, 0.4, 0.2])
    found = load_statistics(torch.from_numpy(loads))
    portion = loads / loads.sum()
    entropy = -(portion * np.log(portion)).sum() / np.log(4)
    assert found["entropy_normalised"] == pytest.approx(entropy)
    assert found["coefficient_of_variation"] == pytest.approx(np.std(loads) / np.mean(loads))
    assert (found["max_over_mean"], found["min_over_mean"]) == pytest.approx((1.6, 0.4))
    assert (found["dead_experts"], found["always_on_experts"]) == ([], [])
    found = load_statistics(torch.tensor([1.0] * K + [0.0] * (E - K), dtype=torch.float64))
    assert found["coefficient_of_variation"] == pytest.approx(math.sqrt(E / K - 1))
    assert found["dead_experts"] == list(range(K, E))
    assert found["always_on_experts"] == list(range(K))
    assert load_statistics(torch.ones(1))["entropy_normalised"] == 1  # beside a shared expert


def test_the_experiment_on_loads_reads_statistics_that_are_measured():
    experiment = Path(__file__).parents[1] / "experiments/fig_expert_utilization/experiment.toml"
    read = re.findall(r"layer=row\)\.(\w+)", experiment.read_text(encoding="utf-8"))
    assert "entropy_normalised" in read
    assert set(read) <= set(load_statistics(torch.ones(4)))


@pytest.mark.parametrize(
    ("share", "words"),
    [
        ([0.5, 0.5, 0.5, 0.5], []),
        ([0.57] * 7 + [0.004], ["1 of 8 experts are dead"]),
        ([0.96] + [0.434] * 7, ["1 of 8 experts run for more than 95 %"]),
        ([0.94, 0.94, 0.06, 0.06], ["uneven"]),
        ([1.0] * K + [0.0] * (E - K), ["9 of 12 experts are dead", "3 of 12 experts run", "1.73"]),
        ([0.99, 0.99, 0.99, 0.83], []),  # k / E near 1: experts that always run mean nothing
        ([1.0, 1.0, 1.0, 1.0], []),
    ],
)
def test_each_rule_warns_by_itself(share, words):
    said = warnings_of(5, torch.tensor(share, dtype=torch.float64))
    assert len(said) == len(words)
    for word, line in zip(words, said, strict=True):
        assert line.startswith("layer 5: ")
        assert word in line


@pytest.fixture
def folder(finished, tmp_path):
    return finished.copied_to(tmp_path / "run").folder


def test_the_load_is_written_and_told(folder, command):
    said = command("analyse", folder, tokens=128)
    assert said.status == 0, said.err
    result = json.loads((folder / "6_evaluate/analysis/expert_utilisation.json").read_text())
    assert (result["origin"], result["provenance"]["seed"]) == ("measured", 0)
    told = " ".join(said.out.split())
    assert all(" ".join(line.split()) in told for line in result["says"])
    assert (result["tokens"], len(result["text"])) == (128, 1)
    assert result["values"]["layers"] == [0, 1]
    assert [sum(layer) for layer in result["values"]["share_LE"]] == pytest.approx([3.0, 3.0])
    assert "is no run" in command("analyse", folder.parent).refusal()


def test_a_silent_router_is_warned_of(folder, command, monkeypatch):
    routes = {"ffn": torch.arange(3).expand(2, 50, 3)}
    monkeypatch.setattr(module, "captured_routes", lambda *arguments: routes)
    assert "warning: layer 0: 9 of 12 experts are dead" in command("analyse", folder).out


def test_outputs_of_experts_are_points(folder, monkeypatch):
    monkeypatch.setattr(expert_outputs, "POINTS", 40)
    monkeypatch.setattr(expert_outputs, "EXPERTS_SHOWN", 4)
    shown = expert_outputs.outputs(expert_outputs.Config(run=str(folder), out="", tokens=128))
    assert shown["layer"] == 0  # at a third of two layers
    assert 20 < len(shown["points"]) == len(shown["expert"]) <= 40
    assert len(set(shown["expert"])) == 4
    assert 0 <= shown["neighbour_agreement"] <= 1
