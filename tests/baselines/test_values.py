"""`dotmoe compare --over-...`: values of one setting. Oracle: the runs' own results."""

import json

import pytest
from transformers import AutoModelForCausalLM

from dotmoe.pipeline.compare import points_of
from dotmoe.run.config import CompareConfig
from runs import TINY_CONVERT

OPTIONS = {key: value for key, value in TINY_CONVERT.items() if key != "expert_size"}


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def values(tiny_dense, text_file, heldout_file, out, command):
    """Runs `dotmoe compare` with the values."""

    def make(**options):
        texts = {"data": text_file, "eval_text": heldout_file}
        return command("compare", tiny_dense("llama"), out, **OPTIONS | texts | options)

    return make


def test_granularity_keeps_the_share_and_goes_on(values, out, monkeypatch):
    def made(*experts):
        said = values(active=0.5, steps=1, over_experts=experts)
        assert said.status == 0
        return said.out

    made(4)
    before = (out / "experts-4" / "manifest.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(AutoModelForCausalLM, "from_pretrained", None)
        made(4)  # loads nothing
    assert "compare.md in" in made(4, 12)  # what the table says is below
    assert (out / "experts-4" / "manifest.json").read_bytes() == before
    dense, four, twelve = json.loads((out / "compare.json").read_text())["rows"]
    assert (dense["run"], dense["loss_above_dense"]) == ("dense", 0.0)
    assert [(r["num_experts"], r["active_experts"]) for r in (four, twelve)] == [(4, 2), (12, 6)]
    for row in (four, twelve):
        results = json.loads((out / row["run"] / "6_evaluate" / "results.json").read_text())
        assert row["perplexity"] == results["moe"]["perplexity"]
        assert row["loss_above_dense"] == results["moe"]["loss"] - results["dense"]["loss"]
    table = (out / "compare.md").read_text()
    assert "| 12 | ridge | router and experts | frozen | 6 of 12 |" in table


def test_shares_and_starts_reach_their_runs():
    plain = {"model": "m", "out": "o", "eval_text": ("b.txt",)}
    points = points_of(CompareConfig(**plain, over_active=(0.25, 0.5, 0.25)))
    assert [point.name for point in points] == ["active-0.25", "active-0.5"]
    assert [point.config.experts.active for point in points] == [0.25, 0.5]
    points = points_of(CompareConfig(**plain, over_start=("random", "data")))
    assert [point.config.calibrate.start for point in points] == ["random", "data"]
    points = points_of(
        CompareConfig(**plain, over_active=(0.25, 0.5), methods=("cmoe",), seeds=(3, 5))
    )
    runs = [(point.name, point.config.method, point.config.seed) for point in points]
    names = ("active-0.25-seed3", "active-0.5-seed3", "active-0.25-seed5", "active-0.5-seed5")
    assert runs == [(name, "cmoe", int(name[-1])) for name in names]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"over_experts": 4, "over_start": "data"}, "two settings"),
        ({"over_experts": 4, "methods": ["cmoe", "lte"]}, "a setting of one"),
        ({"over_experts": [4, 5]}, "does not divide"),
        ({"over_experts": 4, "active_experts": 2}, "k must change"),
        ({"over_active": [0.5, 1.5]}, "1.5"),
        ({"over_experts": 4, "eval_text": []}, "give --eval-text"),
    ],
)
def test_wrong_use_is_refused_before_anything_is_run(options, words, values, out):
    assert words in values(**options).refusal()
    assert not out.exists()


def test_several_ranks_are_refused(values, out, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "dotmoe compare runs in one process" in values(over_experts=4).refusal()
    assert not out.exists()
