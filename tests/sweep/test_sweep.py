"""`dotmoe sweep`. Oracles: the runs' own results, and `dotmoe edit` with `dotmoe evaluate`."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from dotmoe.config import RunConfig
from dotmoe.errors import VerificationError
from dotmoe.pipeline import convert
from dotmoe.run_folder import RunFolder
from runs import TINY_CONVERT

OPTIONS = {key: value for key, value in TINY_CONVERT.items() if key != "expert_size"}


@pytest.fixture
def sweep(tiny_dense, text_file, heldout_file, out, command):
    """Runs `dotmoe sweep` with what is swept."""

    def make(**options):
        texts = {"data": text_file, "eval_text": heldout_file}
        return command("sweep", tiny_dense("llama"), out, **OPTIONS | texts | options)

    return make


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def written(out):
    return json.loads((out / "sweep.json").read_text())


def own(out, name):
    return json.loads((out / name / "6_evaluate" / "results.json").read_text())


def test_granularity_keeps_the_share_and_goes_on(sweep, out, monkeypatch):
    def swept(*experts):
        said = sweep(active=0.5, steps=1, over_experts=experts)
        assert said.status == 0
        return said.out

    swept(4)
    before = (out / "experts-4" / "manifest.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(AutoModelForCausalLM, "from_pretrained", None)
        swept(4)  # loads nothing
    assert "6 of 12" in swept(4, 12)
    assert (out / "experts-4" / "manifest.json").read_bytes() == before
    found = written(out)
    dense, four, twelve = found["rows"]
    assert (dense["run"], dense["loss_above_dense"]) == ("dense", 0.0)
    assert [(r["num_experts"], r["active_experts"]) for r in (four, twelve)] == [(4, 2), (12, 6)]
    for row in (four, twelve):
        results = own(out, row["run"])
        assert row["perplexity"] == results["moe"]["perplexity"]
        assert row["loss_above_dense"] == results["moe"]["loss"] - results["dense"]["loss"]
    assert (
        "| 12 | ridge | router and experts | frozen | 6 of 12 |" in (out / "sweep.md").read_text()
    )


def test_the_grid_is_each_export_with_its_k_edited(sweep, out, heldout_file, command):
    swept = sweep(expert_size=8, steps=0, over_active=[0.25, 0.5], measured_at=[0.25, 0.75])
    assert swept.status == 0
    grid = written(out)["grid"]
    assert grid["trained_at"] == [0.25, 0.5]
    assert grid["active_experts"] == [3, 9]
    for share, row in zip(grid["trained_at"], grid["perplexity_AB"], strict=True):
        folder = out / f"active-{share:g}"
        assert RunFolder(folder).config(RunConfig).experts.active == share
        assert row[0] != row[1]
        for active, perplexity in zip(grid["active_experts"], row, strict=True):
            assert command("edit", folder, active_experts=active).status == 0
            text = {"text": heldout_file, "max_tokens": OPTIONS["eval_tokens"], "json": []}
            measured = json.loads(command("evaluate", folder / "5_export", **text).out)
            assert measured["perplexity"] == pytest.approx(perplexity, rel=1e-5)
    assert "75 % (k = 9)" in (out / "sweep.md").read_text()


def test_the_grid_has_no_row_for_a_run_whose_export_fails_its_verification(sweep, out, monkeypatch):
    def convert_but_one(config, progress):
        if Path(config.out).name == "active-0.5":
            raise VerificationError("layer 2 routes otherwise.")
        return convert(config, progress)

    monkeypatch.setattr("dotmoe.compare.convert", convert_but_one)
    assert sweep(expert_size=8, steps=0, over_active=[0.25, 0.5]).status == 0
    found = written(out)
    assert found["left_out"] == {"active-0.5": "layer 2 routes otherwise."}
    assert (found["grid"]["trained_at"], found["grid"]["measured_at"]) == ([0.25], [0.25, 0.5])
    assert len(found["grid"]["perplexity_AB"]) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "0 things are to be swept"),
        ({"over_experts": 4, "over_start": "data"}, "2 things"),
        ({"over_experts": [4, 5]}, "does not divide"),
        ({"over_experts": 4, "active_experts": 2}, "k must change"),
        ({"over_active": [0.5, 1.5]}, "1.5"),
        ({"over_active": 0.5, "measured_at": 0}, "measured_at is 0.0"),
        ({"over_start": "data", "measured_at": 0.5}, "for --over-active alone"),
        ({"over_experts": 4, "eval_text": []}, "give --eval-text"),
    ],
)
def test_wrong_use_is_refused_before_anything_is_run(options, words, sweep, out):
    assert words in sweep(**options).refusal()
    assert not out.exists()
