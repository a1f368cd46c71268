"""experiments/: each says what it must, quoted is told from measured, and its README is current.

results/: what is measured names the clean commit that it was measured at.
"""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from dotmoe.cli import COMMANDS
from dotmoe.files import write_json
from dotmoe.load import LoadConfig, load_dense

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

readmes = importlib.import_module("readmes")
runner = importlib.import_module("run")
specification = importlib.import_module("specification")

EXPERIMENTS = specification.all_experiments()
RUNS = specification.all_runs()
FILES = sorted((ROOT / "results").rglob("*.json"))
OFFENDERS = ROOT / "tests" / "repo" / "results_without_commit.txt"
KNOWN = {line for line in OFFENDERS.read_text().splitlines() if not line.startswith("#")}
"""May only shrink: a file that is made again goes from it."""
each_experiment = pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda e: e.label)


@each_experiment
def test_an_experiment_says_what_it_must(experiment):
    assert experiment.status in specification.STATUSES
    said = (experiment.claim, experiment.paper_recipe, experiment.scaled_recipe, experiment.finding)
    assert all(text.strip() for text in said)
    assert "to be written" not in experiment.finding
    assert bool(experiment.table) == (experiment.status in ("run", "partly run"))
    assert experiment.table or experiment.result() is None
    assert set(experiment.runs) <= set(RUNS)
    file = (experiment.folder / "experiment.toml").read_text(encoding="utf-8")
    assert set(re.findall(r"dotmoe (\w+) .*?--recipe \w+", file)) <= set(COMMANDS)


@each_experiment
def test_quoted_is_told_from_measured(experiment):
    quoted, result = experiment.quoted(), experiment.result()
    assert quoted is not None or experiment.table
    if quoted is not None:
        assert (quoted["origin"], quoted["label"]) == ("quoted", experiment.label)
        assert quoted["rows"]
        assert quoted["source"]
    if result is not None:
        assert (result["origin"], result["label"]) == ("measured", experiment.label)
        assert {"commit", "hardware", "versions", "seed"} <= set(result["provenance"])
        runs = result["runs"]
        assert set(runs) >= set(experiment.runs)
        assert all(run["command"] for run in runs.values())
        assert not runs or any(run["provenance"] for run in runs.values())


@each_experiment
def test_results_are_those_of_the_experiments_file(experiment):
    result = experiment.result()
    if result is None:
        return
    numbers = {}
    for table, source in zip(result["tables"], experiment.table, strict=True):
        assert set(table["rows"]) == set(source.rows)
        for row, cells in table["rows"].items():
            assert set(cells) == set(source.columns)
            numbers |= {(row, column): value for column, value in cells.items()}
    for one, found in zip(experiment.shows, result["shows"], strict=True):
        values = one.numbers(numbers)
        assert (found["text"], found["numbers"]) == (one.text, values)
        is_rising = sorted(values) == values and len(set(values)) == len(values)
        assert found["verdict"] in {"undecided", "shows" if is_rising else "does not show"}
        assert one.expected in (None, found["verdict"]), one.text
    for one, found in zip(experiment.expected, result["expected"], strict=True):
        assert numbers[one.row, one.column] == found["value"]
        assert abs(found["value"] - one.value) <= one.tolerance * one.value, one
        assert (found["expected"], found["tolerance"]) == (one.value, one.tolerance)
        assert found["within"]


def test_every_readme_is_current():
    for file, text in readmes.readmes().items():
        assert file.read_text(encoding="utf-8") == text, f"scripts/update_documents.py: {file}"


def test_every_run_is_used_and_can_be_ordered():
    needed = {name for one in EXPERIMENTS for name in runner.in_order(one.runs, RUNS)}
    assert needed == set(RUNS)
    for name, run in RUNS.items():
        program, what, *_ = runner.command_of(name, run)
        assert what in COMMANDS if program == "dotmoe" else (ROOT / what).is_file()
        order = runner.in_order([name], RUNS)
        assert order[-1] == name
        assert set(run.needs) < set(order)


def test_places_in_a_file():
    values = {"a": {"b": [{"k": 1, "v": 5.0}, {"k": 2, "v": 7.0}]}, "c": [3, 4, 9]}
    found = [runner.at(values, place) for place in ("a.b[k=2].v", "a.b.0.v", "c.#")]
    assert found == [7.0, 5.0, 3]


def test_a_run_that_is_finished_is_not_started_again(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(runner, "RUNS", tmp_path)
    monkeypatch.setattr(runner, "started", lambda name, run: started.append(name) or 3)
    write_json(tmp_path / "dot_moe_0" / "6_evaluate" / "results.json", {"provenance": {}})
    by_label = {one.label: one for one in EXPERIMENTS}
    assert runner.make(by_label["tab:motivation_mse_combined"], start=True) == 3
    assert started == ["single_layer_0"]


def test_the_recovery_curve_measures_cross_entropy_over_windows(tiny_dense):
    curve = importlib.import_module("recovery_curve")
    dense = load_dense(str(tiny_dense("llama")), LoadConfig(dtype="float32"))
    heldout = curve.Heldout(dense, 600)
    parts = [part.long() for part in heldout.text.tokens.split(256) if len(part) > 1]
    with torch.no_grad():
        losses = [dense.model(input_ids=part[None], labels=part[None]).loss for part in parts]
    lengths = [len(part) - 1 for part in parts]
    found = heldout.measured()
    assert found["tokens"] == sum(lengths) == 597
    mean = sum(float(loss) * n for loss, n in zip(losses, lengths, strict=True)) / 597
    assert found["loss"] == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize(
    ("by_seed", "said"),
    [
        ([[1.0], [2.0]], "shows"),
        ([[2.0], [2.0]], "does not show"),
        ([[1.0, 1.2, 1.1], [1.3, 1.5, 1.4]], "shows"),
        ([[1.0, 1.2, 1.1], [1.1, 1.3, 1.2]], "undecided"),
        ([[1.3, 1.1, 1.2], [1.2, 1.0, 1.1]], "undecided"),
        ([[1.0, 1.2], [2.0, 2.1], [0.0, 0.1]], "does not show"),
    ],
)
def test_a_difference_within_the_spread_of_the_seeds_decides_nothing(by_seed, said):
    assert runner.verdict(by_seed) == said


def commits(value):
    """Of every provenance in a result."""
    if isinstance(value, dict):
        if "provenance" in value:
            yield (value["provenance"] or {}).get("commit")
        value = list(value.values())
    for each in value if isinstance(value, list) else ():
        yield from commits(each)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_result_names_a_clean_commit(file):
    found = list(commits(json.loads(file.read_text(encoding="utf-8"))))
    is_clean = bool(found) and all(commit and "+" not in commit for commit in found)
    name = str(file.relative_to(ROOT / "results"))
    assert is_clean == (name not in KNOWN), f"{name}: {found}"


def test_the_list_of_offenders_only_shrinks():
    assert {str(file.relative_to(ROOT / "results")) for file in FILES} >= KNOWN
    assert len(KNOWN) <= 13
