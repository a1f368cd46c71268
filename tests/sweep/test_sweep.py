"""`dotmoe sweep`. Oracles: the runs' own results, and `dotmoe edit` with `dotmoe evaluate`."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from dotmoe.cli import run
from dotmoe.config import RunConfig
from dotmoe.run_folder import RunFolder

OPTIONS = ["--batch-size", "4", "--seq-len", "32", "--calibration-tokens", "256", "--eval-tokens",
           "512", "--scale-tokens", "256", "--verify-tokens", "128", "--lr", "1e-2"]  # fmt: skip


@pytest.fixture
def start(tiny_dense, tmp_path):
    """Begins a command line; what is swept is to be added."""
    for name, animals in (("text", ["cat", "dog", "crow"]), ("held", ["hen", "cow", "cat"])):
        lines = [f"Line {i}: the {animals[i % 3]} ate {i * 7 % 13} figs." for i in range(300)]
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
    texts = ["--data", str(tmp_path / "text.txt"), "--eval-text", str(tmp_path / "held.txt")]
    return ["sweep", str(tiny_dense("llama")), str(tmp_path / "out"), *texts, *OPTIONS]


def written(out):
    return json.loads((out / "sweep.json").read_text())


def own(out, name):
    return json.loads((out / name / "6_evaluate" / "results.json").read_text())


def test_granularity_keeps_the_share_and_goes_on(start, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    sweep = [*start, "--active", "0.5", "--steps", "1", "--over-experts"]
    assert run([*sweep, "4"]) == 0
    before = (out / "experts-4" / "manifest.json").read_bytes()
    loaded = []
    from_pretrained = AutoModelForCausalLM.from_pretrained

    def counted(folder, *arguments, **options):
        loaded.append(str(folder))
        return from_pretrained(folder, *arguments, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", counted)
    assert run([*sweep, "4"]) == 0
    assert not loaded
    assert run([*sweep, "4", "12"]) == 0
    assert (out / "experts-4" / "manifest.json").read_bytes() == before
    found = written(out)
    dense, four, twelve = found["rows"]
    assert (dense["run"], dense["loss_above_dense"]) == ("dense", 0.0)
    assert [(r["num_experts"], r["active_experts"]) for r in (four, twelve)] == [(4, 2), (12, 6)]
    for row in (four, twelve):
        results = own(out, row["run"])
        assert row["perplexity"] == results["moe"]["perplexity"]
        assert row["loss_above_dense"] == results["moe"]["loss"] - results["dense"]["loss"]
        lines = (out / row["run"] / "2_align" / "metrics.jsonl").read_text().splitlines()
        logged = [json.loads(line) for line in lines]
        assert found["curves"][row["run"]]["kl"] == [line["kl"] for line in logged]
        assert row["align_seconds"] == sum(line["seconds"] for line in logged)
    table = (out / "sweep.md").read_text()
    assert "| 12 | 6 of 12 | 50 % |" in table
    assert "6 of 12" in capsys.readouterr().out


def test_the_grid_is_each_export_with_its_k_edited(start, tmp_path, capsys):
    out = tmp_path / "out"
    sweep = [*start, "--expert-size", "8", "--steps", "0", "--over-active", "0.25", "0.5"]
    assert run([*sweep, "--measured-at", "0.25", "0.75"]) == 0
    found = written(out)
    grid = found["grid"]
    assert grid["trained_at"] == [0.25, 0.5]
    assert grid["active_experts"] == [3, 9]
    for share, row in zip(grid["trained_at"], grid["perplexity_AB"], strict=True):
        folder = out / f"active-{share:g}"
        assert RunFolder(folder).config(RunConfig).experts.active == share
        assert row[0] != row[1]
        for active, perplexity in zip(grid["active_experts"], row, strict=True):
            assert run(["edit", str(folder), "--active-experts", str(active)]) == 0
            capsys.readouterr()
            text = ["--text", str(tmp_path / "held.txt"), "--max-tokens", "512"]
            assert run(["evaluate", str(folder / "5_export"), *text]) == 0
            measured = json.loads(capsys.readouterr().out)
            assert measured["perplexity"] == pytest.approx(perplexity, rel=1e-5)
    assert "75 % (k = 9)" in (out / "sweep.md").read_text()


@pytest.mark.slow
def test_methods_are_finetuned_alike(start, tmp_path):
    out = tmp_path / "out"
    methods = ["--over-methods", "random_split", "dot_moe", "--finetune", "small"]
    assert run([*start, "--steps", "1", *methods, "--finetune-steps", "2", "1"]) == 0
    found = written(out)
    runs = [row["run"] for row in found["rows"]]
    assert runs == ["dense", *["method-random_split"] * 3, *["method-dot_moe"] * 3]
    for row in found["rows"]:
        if "finetune_steps" in row:
            name = f"{row['run']}-finetuned-{row['finetune_steps']}"
            assert row["perplexity"] == own(out, name)["moe"]["perplexity"]
            assert found["curves"][name]["steps"] == [1, 2][: row["finetune_steps"]]
            assert row["finetune_tokens"] == own(out, name)["tokens"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "0 things are to be swept"),
        (["--over-experts", "4", "--over-start", "data"], "2 things"),
        (["--over-experts", "4", "4"], "a value twice"),
        (["--over-experts", "4", "5"], "does not divide"),
        (["--over-experts", "4", "--active-experts", "2"], "k must change"),
        (["--over-active", "0.5", "1.5"], "1.5"),
        (["--over-active", "0.5", "--measured-at", "0"], "measured_at is 0.0"),
        (["--over-start", "data", "--measured-at", "0.5"], "for --over-active alone"),
        (["--over-start", "data", "--finetune-steps", "2"], "for --over-methods alone"),
        (["--over-methods", "dot_moe", "--finetune", "smal"], "Did you mean small?"),
    ],
)
def test_wrong_use_is_refused_before_anything_is_run(options, words, start, tmp_path, capsys):
    assert run([*start, *options]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_sweep_needs_a_text_that_all_runs_share(start, capsys):
    without = [word for word in start if word != "--eval-text" and Path(word).name != "held.txt"]
    assert run([*without, "--over-experts", "4"]) == 2
    assert "give --eval-text" in capsys.readouterr().err
