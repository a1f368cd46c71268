"""Make the missing runs of an experiment, and collect its numbers.

    python experiments/run.py tab_zero_shot_results      # or: make results/tab_zero_shot_results
    python experiments/run.py tab_zero_shot_results --collect    # only from existing runs

Runs are kept in experiments/runs and shared by all experiments: a finished run is not repeated, and
a stopped one is resumed. The commit must be clean, and the results name it. Writes
results/experiments/NAME.json and the experiment's README.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from dotmoe.files import write_json
from dotmoe.run_folder import provenance
from readmes import readmes
from specification import Experiment, Run, all_experiments, all_runs, folder_name, of_seeds

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "experiments" / "runs"
STEP = re.compile(r"[^.\[\]]+|\[[^\]]+\]")


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the missing runs of an experiment.")
    known = {experiment.name: experiment for experiment in all_experiments()}
    parser.add_argument("name", help="label or folder of an experiment, or `all`")
    parser.add_argument(
        "--collect", action="store_true", help="start no run; collect from finished ones"
    )
    arguments = parser.parse_args()
    name = folder_name(arguments.name)
    if name != "all" and name not in known:
        parser.error(f"{arguments.name} is no experiment. Experiments: {', '.join(sorted(known))}.")
    commit = str(provenance(seed=0)["commit"])
    if commit == "None" or "+" in commit:
        parser.error(f"the commit is {commit}. Commit all changes, so that results can name it.")
    wanted = [one for one in (known.values() if name == "all" else [known[name]]) if one.table]
    for experiment in wanted:
        if status := make(experiment, start=not arguments.collect):
            return status
    runs = all_runs()
    (ROOT / "results/experiments").mkdir(exist_ok=True)
    for experiment in wanted:  # last: these files make the commit unclean
        write_json(experiment.result_file, collected(experiment, runs))
    for file, text in readmes().items():
        file.write_text(text, encoding="utf-8")
    return 0


def make(experiment: Experiment, *, start: bool) -> int:
    """Make the missing runs: exit status of the first that failed; 0: all are finished."""
    runs = all_runs()
    for name in in_order(experiment.runs, runs):
        if done_file(name, runs[name]).exists():
            continue
        if not start:
            print(f"{experiment.label}: {name} is not finished")
            return 1
        status = started(name, runs[name])
        if status and not done_file(name, runs[name]).exists():
            print(f"{experiment.label}: {name} failed with status {status}")
            return status
    return 0


def in_order(wanted: list[str], runs: dict[str, Run]) -> list[str]:
    """The wanted runs and those that they need, each after its needs."""
    order: list[str] = []
    for name in wanted:
        order += [n for n in [*in_order(runs[name].needs, runs), name] if n not in order]
    return order


def started(name: str, run: Run) -> int:
    """Start a run's command, and return its exit status."""
    words = command_of(name, run)
    print(f"{name}: {' '.join(words)}", flush=True)
    module = {"dotmoe": ["-m", "dotmoe"], "python": []}[words[0]]
    return subprocess.run([sys.executable, *module, *words[1:]], cwd=ROOT, check=False).returncode


def command_of(name: str, run: Run) -> list[str]:
    """The words of a run's command, with the folders filled in."""
    places = {other: f"experiments/runs/{other}" for other in [*run.needs, name]}
    return shlex.split(run.command.format(out=places[name], **places))


def collected(experiment: Experiment, runs: dict[str, Run]) -> dict[str, Any]:
    """Contents of the result file of an experiment, from the files of its runs."""
    tables = []
    numbers: dict[tuple[str, str], float] = {}
    seeds: dict[tuple[str, str], list[float]] = {}
    for source in experiment.table:
        rows = {}
        for row, named in source.rows.items():
            files = of_seeds(named)
            values = [json.loads(place_of(file).read_text(encoding="utf-8")) for file in files]
            for column, key in source.columns.items():
                at_key = key.replace("{row}", row).replace("{first}", row.split()[0])
                seeds[row, column] = [
                    first_of(of_seed, at_key.replace("{seed}", str(seed)))
                    for seed, of_seed in enumerate(values)
                ]
            mean = {c: fmean(v) if v[1:] else v[0] for (r, c), v in seeds.items() if r == row}
            rows[row] = {column: mean[column] for column in source.columns}
            numbers |= {(row, column): value for column, value in rows[row].items()}
        spreads = {
            row: {
                column: [min(v), max(v)]
                for column in source.columns
                if (v := seeds[row, column])[1:]
            }
            for row in rows
        }
        tables.append(
            {"title": source.title, "files": source.rows, "rows": rows, "spreads": spreads}
        )
    return {
        "label": experiment.label,
        "origin": "measured",
        "tables": tables,
        "expected": [
            {
                "row": one.row,
                "column": one.column,
                "value": numbers[one.row, one.column],
                "expected": one.value,
                "tolerance": one.tolerance,
                "within": abs(numbers[one.row, one.column] / one.value - 1) <= one.tolerance,
            }
            for one in experiment.expected
        ],
        "shows": [
            {
                "text": one.text,
                "numbers": one.numbers(numbers),
                "verdict": verdict(
                    [seeds[p[0], p[1]] if isinstance(p, list) else [p] for p in one.less]
                ),
                "expected": one.expected,
            }
            for one in experiment.shows
        ],
        "runs": {name: made_by(name, runs[name]) for name in in_order(experiment.runs, runs)},
        "provenance": provenance(seed=0),
    }


def verdict(by_seed: list[list[float]]) -> str:
    """Whether each number is below the next, given its values of all seeds.

    Example:
        >>> [verdict(v) for v in ([[1, 2], [3, 4]], [[1, 3], [2, 4]], [[3], [2]])]
        ['shows', 'undecided', 'does not show']
    """
    steps = [
        (fmean(b) - fmean(a), max(max(v) - min(v) for v in (a, b))) for a, b in pairwise(by_seed)
    ]
    if any(step < 0 and -step >= spread for step, spread in steps) or any(
        step == 0 == spread for step, spread in steps
    ):
        return "does not show"
    return "undecided" if any(abs(step) <= spread for step, spread in steps) else "shows"


def place_of(file: str) -> Path:
    return ROOT / file if file.startswith("results/") else RUNS / file


def done_file(name: str, run: Run) -> Path:
    """File that exists once a run is finished; it may be in the folder of a run that it extends."""
    return Path(os.path.normpath(RUNS / name / run.done))


def made_by(name: str, run: Run) -> dict[str, Any]:
    """Recorded command and provenance of a run; without a record, the current command."""
    made = json.loads(done_file(name, run).read_text(encoding="utf-8")).get("provenance")
    recorded = (made or {}).get("command")
    command = recorded or shlex.join(command_of(name, run))
    return {"command": command, "is_recorded": recorded is not None, "provenance": made}


def first_of(values: Any, keys: str) -> Any:
    """The value at the first existing place of several, joined by ` or `."""
    *others, last = keys.split(" or ")
    for key in others:
        try:
            return at(values, key)
        except (KeyError, StopIteration):
            continue
    return at(values, last)


def at(values: Any, key: str) -> Any:
    """The value at `a.b[c=1].d`: members of objects, and the first list entry with c equal to 1.

    `#` at the end gives the length of a list.
    """
    for step in STEP.findall(key):
        if step.startswith("["):
            name, wanted = step[1:-1].split("=")
            values = next(entry for entry in values if str(entry.get(name)) == wanted)
        elif step == "#":
            values = len(values)
        else:
            values = values[int(step) if isinstance(values, list) else step]
    return values


if __name__ == "__main__":
    sys.exit(main())
