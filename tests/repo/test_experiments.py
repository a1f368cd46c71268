"""experiments/: each says what it must, quoted is told from measured, runs are whole.

results/: what is measured names the clean commit that it was measured at.
"""

import json
from pathlib import Path

import pytest

import run as runner
from dotmoe.cli import COMMANDS
from dotmoe.common.files import write_json

ROOT = Path(__file__).resolve().parents[2]
README = {file.parent.name: file.read_text() for file in ROOT.glob("experiments/*/README.md")}
MADE = {file.parent.name for file in ROOT.glob("experiments/*/experiment.toml")}
RUNS = runner.all_runs()
FILES = sorted((ROOT / "results").rglob("*.json"))
OFFENDERS = ROOT / "tests" / "repo" / "results_without_commit.txt"
KNOWN = {line for line in OFFENDERS.read_text().splitlines() if not line.startswith("#")}
"""May only shrink: a file that is made again goes from it."""


@pytest.mark.parametrize("name", sorted(MADE))
def test_results_are_those_of_the_experiments_file(name):
    asked = runner.experiment(name)
    result = json.loads((ROOT / f"results/experiments/{name}.json").read_text())
    assert f"<!-- table: measured {name} -->\n" in README[name]
    assert (result["origin"], result["label"]) == ("measured", asked["label"])
    assert {"commit", "hardware", "versions", "seed"} <= set(result["provenance"])
    assert set(result["runs"]) >= set(asked["runs"])
    assert all(run["command"] for run in result["runs"].values())
    assert any(run["provenance"] for run in result["runs"].values()) or not asked["runs"]
    numbers = {}
    for table, source in zip(result["tables"], asked["table"], strict=True):
        assert set(table["rows"]) == set(source["rows"])
        for row, cells in table["rows"].items():
            assert set(cells) == set(source["columns"])
            numbers |= {(row, column): value for column, value in cells.items()}
    for one, found in zip(asked["shows"], result["shows"], strict=True):
        values = [numbers[tuple(n)] if isinstance(n, list) else n for n in one["less"]]
        assert (found["text"], found["numbers"]) == (one["text"], values)
        is_rising = sorted(values) == values and len(set(values)) == len(values)
        assert found["verdict"] in {
            "inconclusive",
            "confirmed" if is_rising else "contradicted",
        }
        assert one.get("expected") in (None, found["verdict"]), one["text"]


def test_every_run_is_used_and_can_be_ordered():
    wanted = [run for name in MADE for run in runner.experiment(name)["runs"]]
    assert set(runner.in_order(wanted, RUNS)) == set(RUNS)
    for name, run in RUNS.items():
        program, what, *_ = runner.command_of(name, run)
        assert what in COMMANDS if program == "dotmoe" else (ROOT / what).is_file()
        order = runner.in_order([name], RUNS)
        assert order[-1] == name
        assert set(run["needs"]) < set(order)


def test_numbers_are_collected_over_seeds(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "RUNS", tmp_path)
    runs = runner.all_runs()
    for seed in runner.SEEDS:
        points = [{"step": 0, "loss": 3.0}, {"step": 30, "loss": 2.0 + seed}]
        record = {"points": points, "dense": {"loss": 1.5}, "provenance": {"command": "made"}}
        write_json(tmp_path / f"curve_{seed}" / "curve.json", record)
        write_json(tmp_path / f"dot_moe_{seed}" / "6_evaluate/results.json", {"moe": {"loss": 1}})
    columns = {"end": "moe.loss or find(points, step=30).loss", "dense": "dense.loss"}
    shows = [{"text": "grows", "less": [["A", "dense"], ["A", "end"]], "expected": "inconclusive"}]
    asked = {
        "label": "tab:x",
        "runs": [f"curve_{seed}" for seed in runner.SEEDS],
        "table": [{"rows": {"A": "curve_{seed}/curve.json"}, "columns": columns}],
        "shows": shows,
    }
    found = runner.collected(asked, runs)
    assert found["tables"][0]["rows"] == {"A": {"end": 3.0, "dense": 1.5}}
    assert found["tables"][0]["spreads"] == {"A": {"end": [2.0, 4.0], "dense": [1.5, 1.5]}}
    (said,) = found["shows"]
    assert (said["numbers"], said["verdict"]) == ([1.5, 3.0], "inconclusive")
    assert set(found["runs"]) == {
        f"{run}_{seed}" for run in ("curve", "dot_moe") for seed in (0, 1, 2)
    }
    assert found["runs"]["curve_0"]["command"] == "made"


def test_a_run_that_is_finished_is_not_started_again(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(runner, "RUNS", tmp_path)
    monkeypatch.setattr(runner, "started", lambda name, run: started.append(name) or 3)
    write_json(tmp_path / "dot_moe_0" / "6_evaluate" / "results.json", {"provenance": {}})
    asked = runner.experiment("tab_motivation_mse_combined")["runs"]
    assert runner.make(asked, RUNS, start=True) == 3
    assert started == ["single_layer_0"]


@pytest.mark.parametrize(
    ("by_seed", "said"),
    [
        ([[1.0], [2.0]], "inconclusive"),  # one seed, whatever the distance
        ([[1.0], [2.0, 2.1]], "inconclusive"),
        ([[2.0, 2.0], [2.0, 2.0]], "contradicted"),
        ([[1.0, 1.2, 1.1], [1.3, 1.5, 1.4]], "confirmed"),
        ([[1.0, 1.2, 1.1], [1.1, 1.3, 1.2]], "inconclusive"),
        ([[1.3, 1.1, 1.2], [1.2, 1.0, 1.1]], "inconclusive"),
        ([[1.0, 1.2], [2.0, 2.1], [0.0, 0.1]], "contradicted"),
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


def test_results_name_a_clean_commit():
    for file in FILES:
        found = list(commits(json.loads(file.read_text(encoding="utf-8"))))
        is_clean = bool(found) and all(commit and "+" not in commit for commit in found)
        name = str(file.relative_to(ROOT / "results"))
        assert is_clean == (name not in KNOWN), f"{name}: {found}"
