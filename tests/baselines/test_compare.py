"""`dotmoe compare` and `dotmoe convert --method`, on tiny models, exported and verified."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dotmoe.baselines import METHODS, BaselineConfig
from dotmoe.cli import run
from dotmoe.compare import CompareConfig, points_of
from dotmoe.data import DataConfig
from dotmoe.errors import UserError
from dotmoe.layout import ExpertLayout

OPTIONS = ["--expert-size", "8", "--active-experts", "4", "--batch-size", "4", "--seq-len", "32",
           "--calibration-tokens", "256", "--eval-tokens", "512", "--scale-tokens", "256",
           "--verify-tokens", "256", "--lr", "1e-2", "--cluster-starts", "1"]  # fmt: skip


@pytest.fixture
def texts(tmp_path):
    names = []
    for name, animals in (("text", ["cat", "dog", "crow"]), ("held", ["hen", "cow", "cat"])):
        path = tmp_path / f"{name}.txt"
        lines = [f"Line {i}: the {animals[i % 3]} ate {i * 7 % 13} figs." for i in range(300)]
        path.write_text("\n".join(lines))
        names.append(str(path))
    return names


def layout_in(folder):
    return ExpertLayout.load(Path(folder) / "3_extract" / "layout.safetensors")


@pytest.mark.parametrize("method", METHODS)
def test_convert_exports_every_method_verified(method, tiny_dense, texts, tmp_path, capsys):
    out = tmp_path / "run"
    model = str(tiny_dense("qwen2"))
    command = ["convert", model, str(out), "--method", method, "--data", texts[0], *OPTIONS]
    assert run(command) == 0
    assert method in capsys.readouterr().out
    results = json.loads((out / "6_evaluate" / "results.json").read_text())
    assert results["steps"] == 0
    assert results["verification"]["largest_block_error"] < 0.02
    assert ("moe_own_router" in results) == (method == "cmoe")
    assert not (out / "2_align").exists()
    layout = layout_in(out)
    assert layout.shared_size + layout.active_experts * layout.expert_size == 32


def test_a_comparison_measures_all_on_the_same_text_and_goes_on(
    tiny_dense, texts, tmp_path, capsys, monkeypatch
):
    out = tmp_path / "compared"
    options = ["--methods", "dot_moe", "random_split", "--router-steps", "2", *OPTIONS]
    sources = ["--data", texts[0], "--eval-text", texts[1]]
    command = ["compare", str(tiny_dense("llama")), str(out), *sources, *options]
    assert run(command) == 0
    printed = capsys.readouterr().out
    summary = json.loads((out / "compare.json").read_text())
    rows = {row["run"]: row for row in summary["rows"]}
    assert list(rows) == [
        "dense", "dot_moe-untrained", "dot_moe-router", "dot_moe-trained",
        "random_split-own", "random_split-ridge", "random_split-trained",
    ]  # fmt: skip
    assert rows["dense"]["loss_above_dense"] == 0
    for name, row in rows.items():
        if name == "dense":
            continue
        results = json.loads((out / name / "6_evaluate" / "results.json").read_text())
        assert row["perplexity"] == results["moe"]["perplexity"]
        assert row["tokens"] == rows["dense"]["tokens"]
        assert row["active_fraction"] == pytest.approx(1 / 3)
        assert f"{row['perplexity']:.2f}" in (out / "compare.md").read_text()
    assert "compare.json" in printed
    held = [load_file(out / n / "0_data" / "heldout.safetensors")["tokens"] for n in list(rows)[1:]]
    assert all(torch.equal(held[0], other) for other in held)

    fixed = layout_in(out / "random_split-ridge"), layout_in(out / "random_split-trained")
    assert torch.equal(fixed[0].expert_of_neuron_LN, fixed[1].expert_of_neuron_LN)
    assert not torch.equal(fixed[0].router_LED, fixed[1].router_LED)

    # A finished comparison reads what its runs left; neither models nor the age of files matter.
    for name in list(rows)[1:]:
        os.utime(out / name / "3_extract" / "layout.safetensors", (2e9, 2e9))
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    assert run(command) == 0
    again = json.loads((out / "compare.json").read_text())
    assert again["rows"] == summary["rows"]
    assert all(0 < row["seconds"] < 1e4 for row in summary["rows"][1:])


def plain(**options):
    return CompareConfig(
        model="m", out="o", data=DataConfig(data=("a.txt",)), eval_text=("b.txt",), **options
    )


def test_options_reach_the_methods_they_are_for_and_no_run_is_made_twice():
    made = points_of(plain(baseline=BaselineConfig(shared_experts=2, router_steps=7)))
    assert len({point.name for point in made}) == len(made)
    for point in made:
        shared = point.config.baseline.shared_experts
        assert shared == (2 if point.value in ("cmoe", "llama_moe_v2_residual") else None)
    trained = {p.value for p in made if p.config.baseline.router_steps or p.value == "dot_moe"}
    assert trained == set(METHODS) - {"cmoe", "llama_moe_v2_residual"} | {"dot_moe"}
    steps = [p.config.align.steps for p in made if p.value == "dot_moe"]
    assert steps == [0, 7, 7]


def test_a_comparison_without_a_text_of_its_own_is_refused():
    config = CompareConfig(model="m", out="o", data=DataConfig(data=("a.txt",)))
    with pytest.raises(UserError, match=r"eval_text names no text.*--eval-text"):
        points_of(config)
    with pytest.raises(UserError, match="twice"):
        points_of(plain(methods=("cmoe", "cmoe")))


def test_an_unknown_method_offers_the_nearest(texts, tmp_path, capsys):
    assert run(["convert", "m", str(tmp_path / "o"), "--method", "cmoee", "--data", texts[0]]) == 2
    assert "Did you mean cmoe" in capsys.readouterr().err
