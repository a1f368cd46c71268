"""`dotmoe analyse`: every analysis of a tiny run."""

import json

import pytest
import torch

from dotmoe.common.errors import UserError
from dotmoe.measure.analyse import ANALYSES, AnalyseConfig, analyse, experts

QUICK = {"tokens": 128}


@pytest.fixture
def folder(finished, tmp_path):
    return finished.copied_to(tmp_path / "run").folder


def analysed(folder, name, **options):
    return analyse(AnalyseConfig(run=folder, only=[name], **options))[name]


def results(folder):
    files = (folder / "6_evaluate" / "analysis").glob("*.json")
    return {file.stem: json.loads(file.read_text()) for file in files}


def test_every_analysis_is_written(folder, command, monkeypatch):
    monkeypatch.setattr(experts, "POINTS", 40)
    monkeypatch.setattr(experts, "EXPERTS_SHOWN", 4)
    said = command("analyse", folder, **QUICK)
    assert said.status == 0, said.err
    found = results(folder)
    assert list(ANALYSES) == [name for name in ANALYSES if name in found and name in said.out]
    for name, result in found.items():
        assert result["analysis"] == name
        assert result["origin"] == "measured"
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


def test_a_silent_router_is_warned_of(folder, command, monkeypatch):
    routes = torch.arange(3).expand(2, 50, 3)
    monkeypatch.setattr(
        "dotmoe.measure.analyse.run.captured_routes", lambda *arguments: {"ffn": routes}
    )
    said = command("analyse", folder, only="expert_utilisation")
    assert "warning: layer 0: 9 of 12 experts are dead" in said.out


def test_what_a_run_has_nothing_for_is_left_out_or_refused_by_name(folder, monkeypatch, command):
    monkeypatch.setattr("dotmoe.common.errors.find_spec", lambda package: None)
    found = analyse(AnalyseConfig(run=str(folder), tokens=128))
    assert list(found) == ["expert_utilisation"]
    with pytest.raises(UserError, match=r"\.\[analysis\]"):
        analysed(folder, "expert_outputs_tsne")
    assert "is no run" in command("analyse", folder.parent).refusal()


def test_a_finetuned_run_has_its_own_routing(finished, finetuned, tmp_path):
    copies = (made.copied_to(tmp_path / made.name).folder for made in (finished, finetuned))
    first, second = (analysed(copy, "expert_utilisation", tokens=128)["values"] for copy in copies)
    assert first["share_LE"] != second["share_LE"]
