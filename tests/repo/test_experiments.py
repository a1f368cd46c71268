"""experiments/: each says what it must, quoted is told from measured, and its README is current."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from dotmoe.cli import COMMANDS
from dotmoe.load import LoadConfig, load_dense

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

readmes = importlib.import_module("readmes")
runner = importlib.import_module("run")
specification = importlib.import_module("specification")

EXPERIMENTS = specification.all_experiments()
RUNS = specification.all_runs()


def every(values, key):
    """All values of a key, however deep."""
    if isinstance(values, dict):
        found = [values[key]] if key in values else []
        return found + [hit for value in values.values() for hit in every(value, key)]
    return (
        [hit for value in values for hit in every(value, key)] if isinstance(values, list) else []
    )


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda e: e.label)
def test_an_experiment_says_what_it_must(experiment):
    assert experiment.status in specification.STATUSES
    for text in (experiment.claim, experiment.paper_recipe, experiment.scaled_recipe):
        assert text.strip()
    assert experiment.finding.strip()
    assert "to be written" not in experiment.finding
    was_run = experiment.status in ("run", "partly run")
    assert bool(experiment.table) == was_run == (experiment.result() is not None)
    assert set(experiment.runs) <= set(RUNS)
    file = (experiment.folder / "experiment.toml").read_text(encoding="utf-8")
    for command, option in re.findall(r"dotmoe (\w+) .*?--recipe (\w+)", file):
        assert command in COMMANDS
        assert option


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda e: e.label)
def test_quoted_is_told_from_measured(experiment):
    quoted, result = experiment.quoted(), experiment.result()
    if quoted is not None:
        assert quoted["origin"] == "quoted"
        assert quoted["label"] == experiment.label
        assert quoted["rows"]
        assert quoted["source"]
    if result is not None:
        assert result["origin"] == "measured"
        assert result["label"] == experiment.label
        assert {"commit", "hardware", "versions", "seed"} <= set(result["provenance"])
        assert set(result["runs"]) >= set(experiment.runs)
        for run in result["runs"].values():
            assert run["command"]
            assert run["provenance"] is None or run["provenance"]["hardware"]
        assert not result["runs"] or any(run["provenance"] for run in result["runs"].values())
    assert quoted is not None or result is not None


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda e: e.label)
def test_results_are_those_of_the_experiments_file(experiment):
    result = experiment.result()
    if result is None:
        return
    rows = [set(table["rows"]) for table in result["tables"]]
    assert rows == [set(table.rows) for table in experiment.table]
    for table, source in zip(result["tables"], experiment.table, strict=True):
        for row in table["rows"].values():
            assert set(row) == set(source.columns)
    numbers = {
        (row, column): value
        for table in result["tables"]
        for row, cells in table["rows"].items()
        for column, value in cells.items()
    }
    assert [one.text for one in experiment.shows] == [one["text"] for one in result["shows"]]
    for one, found in zip(experiment.shows, result["shows"], strict=True):
        values = one.numbers(numbers)
        assert found["numbers"] == values
        assert found["shows"] == (sorted(values) == values and len(set(values)) == len(values))
        assert found["shows"] == one.expected, one.text
    for one, found in zip(experiment.expected, result["expected"], strict=True):
        assert numbers[one.row, one.column] == found["value"]
        assert abs(found["value"] - one.value) <= one.tolerance * one.value, one
        assert (found["expected"], found["tolerance"]) == (one.value, one.tolerance)
        assert found["within"]


def test_every_readme_is_current():
    for file, text in readmes.readmes().items():
        assert file.read_text(encoding="utf-8") == text, (
            f"python scripts/update_documents.py: {file}"
        )


def test_every_run_is_used_and_can_be_ordered():
    needed = {name for one in EXPERIMENTS for name in runner.in_order(one.runs, RUNS)}
    assert needed == set(RUNS)
    for name, run in RUNS.items():
        words = runner.command_of(name, run)
        assert words[0] in ("dotmoe", "python")
        assert words[1] in COMMANDS if words[0] == "dotmoe" else (ROOT / words[1]).is_file()
        order = runner.in_order([name], RUNS)
        assert order[-1] == name
        assert set(run.needs) < set(order)


def test_places_in_a_file():
    values = {"a": {"b": [{"k": 1, "v": 5.0}, {"k": 2, "v": 7.0}]}, "c": [3, 4, 9]}
    assert runner.at(values, "a.b[k=2].v") == 7.0
    assert runner.at(values, "a.b.0.v") == 5.0
    assert runner.at(values, "c.#") == 3


def test_a_run_that_is_finished_is_not_started_again(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(runner, "RUNS", tmp_path)
    monkeypatch.setattr(runner, "started", lambda name, run: started.append(name) or 3)
    first, second = tmp_path / "dot_moe" / "6_evaluate", tmp_path / "fidelity_dot_moe"
    first.mkdir(parents=True)
    (first / "results.json").write_text(json.dumps({"provenance": {}}))
    by_label = {one.label: one for one in EXPERIMENTS}
    assert runner.make(by_label["tab:motivation_mse_combined"], start=True) == 3
    assert started == [second.name]


def test_the_recovery_curve_measures_cross_entropy_over_windows(tiny_dense):
    curve = importlib.import_module("recovery_curve")
    dense = load_dense(str(tiny_dense("llama")), LoadConfig(dtype="float32"))
    heldout = curve.Heldout(dense, 600)
    parts = [part for part in heldout.text.tokens.split(256) if len(part) > 1]
    with torch.no_grad():
        nats = [
            torch.nn.functional.cross_entropy(
                dense.model(input_ids=part[None]).logits[0, :-1], part[1:].long(), reduction="sum"
            )
            for part in parts
        ]
    found = heldout.measured()
    assert found["tokens"] == sum(len(part) - 1 for part in parts) == 597
    assert found["loss"] == pytest.approx(float(sum(nats)) / 597, rel=1e-5)
