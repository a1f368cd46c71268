"""`dotmoe analyse`: every analysis of a tiny run, made once, from inputs that did not change."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from dotmoe.analyse import ANALYSES, AnalyseConfig, analyse
from dotmoe.cli import run
from dotmoe.errors import UserError
from dotmoe.layout import ExpertLayout
from dotmoe.run_folder import RunFolder

QUICK = ["--tokens", "256", "--points", "60", "--experts-shown", "4", "--profile-steps", "2"]


@pytest.fixture
def folder(aligned, tmp_path):
    return shutil.copytree(aligned, tmp_path / "run")


def results(folder):
    files = (folder / "6_evaluate" / "analysis").glob("*.json")
    return {file.stem: json.loads(file.read_text()) for file in files}


def test_every_analysis_is_written_and_found_again(folder, capsys):
    pytest.importorskip("sklearn")
    assert run(["analyse", str(folder), *QUICK]) == 0
    said = capsys.readouterr()
    found = results(folder)
    assert list(ANALYSES) == [name for name in ANALYSES if name in found and name in said.out]
    assert found["routing_overlap"]["command"].startswith(f"dotmoe analyse {folder} --tokens")
    for name, result in found.items():
        assert result["analysis"] == name
        assert result["origin"] == "measured"
        assert result["provenance"]["seed"] == 0
    used = found["expert_utilisation"]
    assert (used["tokens"], len(used["text"])) == (256, 1)
    assert used["values"]["layers"] == [0, 1]
    assert [sum(layer) for layer in used["values"]["share_LE"]] == pytest.approx([3.0, 3.0])
    shown = found["expert_outputs_tsne"]["values"]
    assert shown["layer"] == 0  # at a third of two layers
    assert len(shown["points"]) == len(shown["expert"]) == 60
    assert len(set(shown["expert"])) == 4

    assert run(["analyse", str(folder), *QUICK]) == 0
    assert capsys.readouterr().err.count("is there already") == 5
    assert results(folder) == found
    assert run(["convert", "--config", str(folder / "config.json"), *again(folder)]) == 0


def again(folder):
    """The run itself takes no offence at files that it has not made."""
    return [json.loads((folder / "config.json").read_text())["model"], str(folder)]


def test_another_text_or_damage_makes_an_analysis_anew(folder, capsys):
    command = ["analyse", str(folder), "--only", "expert_utilisation", "--tokens"]
    assert run([*command, "256"]) == 0
    before = results(folder)["expert_utilisation"]
    assert run([*command, "512"]) == 0
    assert results(folder)["expert_utilisation"]["tokens"] == 512
    file = folder / "6_evaluate" / "analysis" / "expert_utilisation.json"
    file.write_text(file.read_text()[:100])
    assert run([*command, "256"]) == 0
    assert results(folder)["expert_utilisation"]["values"] == before["values"]

    older = before | {"inputs": before["inputs"] | {"form": 0}, "values": {}}
    file.write_text(json.dumps(older))
    assert run([*command, "256"]) == 0
    assert results(folder)["expert_utilisation"]["values"] == before["values"]
    capsys.readouterr()


def test_the_history_is_what_the_alignment_logged(folder, capsys):
    assert run(["analyse", str(folder), "--only", "alignment_history"]) == 0
    lines = (folder / "2_align" / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines]
    values = results(folder)["alignment_history"]["values"]
    assert values["steps"] == [1, 2, 3, 4]
    for name in ("kl", "ce", "moved_fraction", "tau", "soft_hard_gap"):
        assert values[name] == [line[name] for line in logged]
    assert all(0 < gap < 1 for gap in values["soft_hard_gap"])
    assert len(values["kept_from_start"]) == 2
    assert "4 steps" in capsys.readouterr().out


def test_parts_of_a_step_make_up_the_step_and_leave_the_run_as_it_was(folder):
    state = (folder / "2_align" / "state.safetensors").read_bytes()
    config = AnalyseConfig(run=str(folder), only=("overhead_profile",), profile_steps=2)
    values = analyse(config)["overhead_profile"]["values"]
    assert sum(values["shares"].values()) == pytest.approx(1.0)
    assert min(values["shares"].values()) >= 0
    assert {"dense forward", "student forward", "backward", "assignment solve", "rounding"} < set(
        values["shares"]
    )
    assert {"straight-through", "optimizer", "head and losses"} < set(values["shares"])
    method = sum(values["seconds"][part] for part in values["overhead_parts"])
    assert values["overhead"] == pytest.approx(method / (values["step_s"] - method))
    assert values["tokens_a_step"] == 4 * 32
    assert (folder / "2_align" / "state.safetensors").read_bytes() == state


def test_a_silent_router_is_warned_of(folder, capsys):
    """Six equal rows and six of zeros: two groups of tokens, and three experts for each."""
    file = folder / "3_extract" / "layout.safetensors"
    layout = ExpertLayout.load(file)
    layout.router_LED[:] = 0
    layout.router_LED[:, :6] = torch.randn(1, 1, layout.router_LED.shape[2])
    shutil.rmtree(file.parent)
    RunFolder(folder).run_stage(
        "extract", ExpertLayout.load, lambda at: layout.save(at / file.name)
    )
    assert run(["analyse", str(folder), "--only", "expert_utilisation", "--tokens", "256"]) == 0
    assert "dead" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--layer", "2"], "split layers are 0 to 1"),
        (["--tokens", "0"], "tokens is 0"),
        (["--experts-shown", "1"], "experts_shown is 1"),
        (["--only", "expert_utilization"], "Did you mean expert_utilisation?"),
    ],
)
def test_wrong_use_is_refused_in_one_line(options, words, folder, capsys):
    assert run(["analyse", str(folder), *options]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert not (folder / "6_evaluate" / "analysis").exists()


def test_what_a_run_has_nothing_for_is_left_out_or_refused_by_name(folder, monkeypatch, capsys):
    monkeypatch.setattr("dotmoe.analyse.find_spec", lambda package: None)
    (folder / "2_align" / "metrics.jsonl").unlink()
    found = analyse(AnalyseConfig(run=str(folder), tokens=256))
    assert list(found) == ["expert_utilisation"]
    for name, word in (("routing_overlap", "dotmoe\\[analysis\\]"), ("overhead_profile", "steps")):
        with pytest.raises(UserError, match=word):
            analyse(AnalyseConfig(run=str(folder), only=(name,)))
    assert run(["analyse", str(folder.parent)]) == 2
    assert "is no run" in capsys.readouterr().err


@pytest.mark.slow
def test_a_finetuned_run_has_its_own_routing_and_the_history_of_its_source(folder, tmp_path):
    out = tmp_path / "finetuned"
    options = ["--recipe", "small", "--steps", "2", "--batch-size", "4", "--seq-len", "32"]
    options += ["--scale-tokens", "256", "--verify-tokens", "128", "--lr", "0.05"]
    assert run(["finetune", str(folder), str(out), *options]) == 0
    names = ("expert_utilisation", "alignment_history", "overhead_profile")
    config = AnalyseConfig(run=str(out), only=names, tokens=256, profile_steps=1)
    of_source = analyse(replace(config, run=str(folder)))
    of_finetuned = analyse(config)
    loads = [
        found["expert_utilisation"]["values"]["share_LE"] for found in (of_source, of_finetuned)
    ]
    assert loads[0] != loads[1]
    assert of_finetuned["alignment_history"]["values"] == of_source["alignment_history"]["values"]
    shutil.rmtree(folder)
    assert list(analyse(replace(config, only=()))) == list(ANALYSES)[:3]


@pytest.mark.slow
def test_a_shared_expert_is_no_part_of_the_load(tiny_dense, tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(f"The crow ate {i} figs." for i in range(900)))
    out = tmp_path / "cmoe"
    options = ["--method", "cmoe", "--expert-size", "8", "--active-experts", "4"]
    options += ["--calibration-tokens", "256", "--eval-tokens", "512", "--scale-tokens", "256"]
    options += ["--verify-tokens", "256", "--seq-len", "32", "--cluster-starts", "1"]
    command = ["convert", str(tiny_dense("llama")), str(out), "--data", str(tmp_path / "text.txt")]
    assert run([*command, *options]) == 0
    found = analyse(AnalyseConfig(run=str(out), tokens=256, points=40))
    assert list(found) == list(ANALYSES)[:3]
    used = found["expert_utilisation"]["values"]
    assert (used["num_experts"], used["active_experts"]) == (10, 2)
    assert [sum(layer) for layer in used["share_LE"]] == pytest.approx([2.0, 2.0])
    assert [sum(layer) for layer in used["energy_share_LE"]] == pytest.approx([1.0, 1.0])
