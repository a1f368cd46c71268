"""Experts made of heads by the commands. Oracle: an uninterrupted run."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from runs import TINY_CONVERT, Forked, TinyRun


@pytest.fixture(scope="module")
def both(tiny_dense, text_file, tmp_path_factory):
    """A finished conversion of both targets."""
    options = {"data": text_file, **TINY_CONVERT, "targets": "both", "heads_per_expert": 1}
    out = tmp_path_factory.mktemp("both") / "run"
    return TinyRun("convert", tiny_dense("llama"), out, options).made()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")
def test_an_alignment_of_both_that_was_killed_ends_as_one_that_was_not(both, tmp_path):
    killed = both.at(tmp_path / "run")
    process = Forked(killed.command())
    checkpoint = killed.folder / "2_align/checkpoints/step_00000002"
    assert process.kill_when(checkpoint.exists), process.said()
    assert killed.made().tensors() == both.tensors()
    states = (load_file(both.folder / f"{n}/state.safetensors") for n in ("1_calibrate", "2_align"))
    before, after = states
    assert not any(torch.equal(before[name], after[name]) for name in before if name != "step")
    lines = (both.folder / "2_align/metrics.jsonl").read_text().splitlines()
    assert {"moved_fraction", "attention_moved_fraction"} <= set(json.loads(lines[-1]))


def test_what_a_run_of_both_leaves_and_what_later_commands_say(both, command, tmp_path):
    run = both.folder
    results = json.loads((run / "6_evaluate/results.json").read_text())
    split = results["granularity"]
    assert (split["target"], split["beside"]["target"]) == ("ffn", "attention")
    assert (split["beside"]["num_experts"], split["beside"]["active_experts"]) == (4, 2)
    assert results["verification"]["logits_error"] < 1e-4
    model = AutoModelForCausalLM.from_pretrained(run / "5_export")
    assert type(model).__name__ == "DotMoeForCausalLM"
    shown = command("analyse", run, tokens=512)
    assert shown.status == 0, shown.err
    found = json.loads((run / "6_evaluate/analysis/expert_utilisation.json").read_text())
    loads = torch.tensor(found["values"]["attention"]["share_LE"])
    torch.testing.assert_close(loads.sum(dim=1), torch.full((2,), 2.0))
    assert command("report", run).status == 0
    said = (run / "7_report/report.md").read_text()
    assert "12 experts of 8 neurons; 3 run per token" in said
    assert "4 experts of 1 query heads; 2 run per token" in said
    refused = command("finetune", run, tmp_path / "out").refusal()
    assert "experts made of heads, which cannot be trained" in refused
    refused = command("export", run, tmp_path / "out", format="gguf").refusal()
    assert "experts made of heads" in refused
    assert not list(tmp_path.iterdir())


def test_both_are_repaired(tiny_dense, text_file, command, tmp_path):
    options = {"data": text_file, **TINY_CONVERT, "steps": 0, "repair": [], "repair_tokens": 512}
    options |= {"targets": "both", "heads_per_expert": 1}
    repaired = command("convert", tiny_dense("llama"), tmp_path / "r", **options)
    assert repaired.status == 0, repaired.err
    figures = json.loads((tmp_path / "r/4_repair/repair.json").read_text())
    assert [layer.get("target", "ffn") for layer in figures["layers"]] == ["attention", "ffn"] * 2
    frozen, moe = (
        json.loads((tmp_path / "r/6_evaluate/results.json").read_text())[name]["loss"]
        for name in ("frozen", "moe")
    )
    assert moe < frozen


@pytest.mark.slow
def test_a_random_split_of_heads_is_a_row_beside_dot_moe(tiny_dense, text_file, tmp_path, command):
    options = {"data": text_file, **TINY_CONVERT, "targets": "attention", "eval_text": text_file}
    options |= {"methods": ["dot_moe", "random_split"], "router_steps": 2, "repair": []}
    for name in ("steps", "expert_size", "active"):  # of neurons
        options.pop(name, None)
    made = command("compare", tiny_dense("qwen2"), tmp_path / "c", **options)
    assert made.status == 0, made.err
    rows = json.loads((tmp_path / "c/compare.json").read_text())["rows"][1:]
    kinds = {(row["value"], row["trained"], row["weights"]) for row in rows}
    assert ("random_split", "router", "frozen") in kinds
    assert ("dotmoe", "router and experts", "repaired") in kinds
    assert ("DOT-MoE (paper)", "router and experts", "frozen") in kinds
    assert {(row["target"], row["num_experts"], row["active_experts"]) for row in rows} == {
        ("attention", 2, 1)
    }
    assert {row["router"] for row in rows} == {"ridge", "own", "random"}
