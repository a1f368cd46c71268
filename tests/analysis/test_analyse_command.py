"""`dotmoe analyse`: every analysis of a tiny run, made once, from inputs that did not change."""

import importlib
import json
import time
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from dotmoe.common.errors import UserError
from dotmoe.measure.analyse import ANALYSES, AnalyseConfig, analyse, experts
from dotmoe.measure.analyse.experts import costs_said
from dotmoe.method.layout import ALWAYS_ON
from dotmoe.method.masked import masked_by
from dotmoe.method.router import is_dense
from dotmoe.models.config import LoadConfig
from dotmoe.models.load import load_dense
from dotmoe.run.finished import FinishedRun

QUICK = {"tokens": 128, "profile_steps": 2}


@pytest.fixture
def folder(finished, tmp_path):
    return finished.copied_to(tmp_path / "run").folder


def analysed(folder, name, **options):
    return analyse(AnalyseConfig(run=folder, only=[name], **options))[name]


def results(folder):
    files = (folder / "6_evaluate" / "analysis").glob("*.json")
    return {file.stem: json.loads(file.read_text()) for file in files}


def test_every_analysis_is_written_and_found_again(folder, command, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(experts, "POINTS", 40)
    monkeypatch.setattr(experts, "EXPERTS_SHOWN", 4)
    said = command("analyse", folder, **QUICK)
    assert said.status == 0, said.err
    found = results(folder)
    assert list(ANALYSES) == [name for name in ANALYSES if name in found and name in said.out]
    for name, result in found.items():
        assert result["analysis"] == name
        assert result["origin"] == "measured"
        assert result["command"].startswith(f"dotmoe analyse {folder} --tokens")
        assert result["provenance"]["seed"] == 0
        assert all(line in said.out for line in result["says"])
    used = found["expert_utilisation"]
    assert (used["tokens"], len(used["text"])) == (128, 1)
    assert used["values"]["layers"] == [0, 1]
    assert [sum(layer) for layer in used["values"]["share_LE"]] == pytest.approx([3.0, 3.0])
    shown = found["expert_outputs_tsne"]["values"]
    assert shown["layer"] == 0  # at a third of two layers
    assert 20 < len(shown["points"]) == len(shown["expert"]) <= 40
    assert len(set(shown["expert"])) == 4
    assert command("analyse", folder, **QUICK).err.count("is there already") == 4
    assert results(folder) == found


def test_another_text_or_damage_makes_an_analysis_anew(folder):
    before = analysed(folder, "expert_utilisation", tokens=128)
    assert analysed(folder, "expert_utilisation", tokens=256)["tokens"] == 256
    file = folder / "6_evaluate" / "analysis" / "expert_utilisation.json"
    of_another_form = before | {"inputs": before["inputs"] | {"form": 0}, "values": {}}
    for damaged in (file.read_text()[:100], json.dumps(of_another_form)):
        file.write_text(damaged)
        assert analysed(folder, "expert_utilisation", tokens=128)["values"] == before["values"]


def test_one_layer_split_by_itself_is_a_layout_whose_others_are_dense(folder):
    """Oracle: the logits of Transformers, and the layout of the last layer alone."""
    values = analysed(folder, "layer_sensitivity", tokens=128)["values"]
    run = FinishedRun(folder)
    dense, tokens = load_dense(run.model, LoadConfig()), run.text.heldout.tokens_BT.long()
    tokens = tokens[: 128 // tokens.shape[1]]

    @torch.no_grad()
    def loss():
        logits = dense.model(input_ids=tokens).logits[:, :-1]
        return float(cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))

    split = run.layouts[0].expert_of_neuron_LN.clone()
    split[0] = ALWAYS_ON
    reference = loss()
    with masked_by(dense, replace(run.layouts[0], expert_of_neuron_LN=split)):
        assert values["alone_L"][1] == pytest.approx(loss() - reference, abs=1e-5)
    with masked_by(dense, *run.layouts):
        assert values["at_once"] == pytest.approx(loss() - reference, abs=1e-5)
    assert (values["layers"], values["dense"]) == ([0, 1], pytest.approx(reference, abs=1e-5))


@pytest.mark.parametrize(("first", "advised"), [(0.9, True), (0.2, False)])
def test_a_first_layer_that_costs_most_is_advised_to_stay_dense(first, advised):
    said = costs_said([0, 1, 2, 3, 4, 5], [first, *[0.1] * 5], at_once=1.2)
    assert ("--first-dense-layers 1" in said) == advised


def test_parts_of_a_step_make_up_the_step_and_leave_the_run_as_it_was(folder):
    state = (folder / "2_align" / "state.safetensors").read_bytes()
    values = analysed(folder, "overhead_profile", profile_steps=2)["values"]
    assert sum(values["shares"].values()) == pytest.approx(1.0)
    assert min(values["shares"].values()) >= 0
    assert set(values["shares"]) >= {
        *("dense forward", "student forward", "head and losses", "backward"),
        *("assignment solve", "rounding", "straight-through", "optimizer"),
    }
    method = sum(values["seconds"][part] for part in values["overhead_parts"])
    assert values["overhead"] == pytest.approx(method / (values["step_s"] - method))
    assert values["tokens_a_step"] == 2 * 32
    assert (folder / "2_align" / "state.safetensors").read_bytes() == state


@pytest.mark.parametrize(
    ("called", "part"),
    [
        ("dotmoe.method.objective.hidden_states", "dense forward"),
        ("dotmoe.method.objective.hidden_states", "student forward"),
        ("dotmoe.method.objective.distillation_loss", "head and losses"),
        ("dotmoe.method.align.greedy_assignment", "rounding"),
    ],
)
def test_time_that_a_part_takes_counts_under_its_own_name(called, part, folder, monkeypatch):
    home, name = called.rsplit(".", 1)
    plain = getattr(importlib.import_module(home), name)

    def slow(*arguments, **options):
        start = time.perf_counter()
        if name != "hidden_states" or is_dense() == (part == "dense forward"):
            while time.perf_counter() < start + 0.5:  # of the processor, too
                pass
        return plain(*arguments, **options)

    monkeypatch.setattr(called, slow)
    shares = analysed(folder, "overhead_profile", profile_steps=1)["values"]["shares"]
    assert max(shares, key=shares.get) == part


def test_a_silent_router_is_warned_of(folder, command, monkeypatch):
    routes = torch.arange(3).expand(2, 50, 3)
    monkeypatch.setattr(
        "dotmoe.measure.analyse.run.captured_routes", lambda *arguments: {"ffn": routes}
    )
    said = command("analyse", folder, only="expert_utilisation")
    assert "warning: layer 0: 9 of 12 experts are dead" in said.out


def test_what_a_run_has_nothing_for_is_left_out_or_refused_by_name(folder, monkeypatch, command):
    monkeypatch.setattr("dotmoe.common.errors.find_spec", lambda package: None)
    (folder / "2_align" / "metrics.jsonl").unlink()
    found = analyse(AnalyseConfig(run=str(folder), tokens=128))
    assert list(found) == ["expert_utilisation", "layer_sensitivity"]
    for name, word in (("expert_outputs_tsne", "\\.\\[analysis\\]"), ("overhead_profile", "steps")):
        with pytest.raises(UserError, match=word):
            analysed(folder, name)
    assert "is no run" in command("analyse", folder.parent).refusal()


def test_a_finetuned_run_has_its_own_routing(finished, finetuned, tmp_path):
    copies = (made.copied_to(tmp_path / made.name).folder for made in (finished, finetuned))
    first, second = (analysed(copy, "expert_utilisation", tokens=128)["values"] for copy in copies)
    assert first["share_LE"] != second["share_LE"]
