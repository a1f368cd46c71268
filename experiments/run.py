"""Make the missing runs of an experiment, and collect its numbers.

    python experiments/run.py tab_zero_shot_results      # or: make results/tab_zero_shot_results
    python experiments/run.py tab_zero_shot_results --collect    # only from existing runs

`runs.toml` has the runs, kept in experiments/runs and shared by all experiments: a finished one is
not repeated, and a stopped one is resumed. `NAME/experiment.toml` has of an experiment:

- `runs`: those it needs, with theirs;
- `[[table]]`: `rows`, each with a file of a run or under results/, and `columns`, each a Python
  expression over the keys of that file, `row` and `seed`; `find(rows, name=value)` is a row;
- `[[shows]]`: a finding as numbers in ascending order, [row, column] or plain, and the verdict that
  is expected at small scale.

`{seed}` stands for three seeds. The commit must be clean, and the results name it. Writes
results/experiments/NAME.json and the documents.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from dotmoe.common.files import read_json, write_json
from dotmoe.run.provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))

import update_documents  # noqa: E402 - from that folder
from document_tables import records  # noqa: E402

RUNS = ROOT / "experiments" / "runs"
SEEDS = range(3)

Run = dict[str, Any]
"""An entry of runs.toml: `command`, the file `done` that the finished run has, and its `needs`."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the missing runs of an experiment.")
    known = sorted(file.parent.name for file in ROOT.glob("experiments/*/experiment.toml"))
    parser.add_argument("name", choices=[*known, "all"])
    parser.add_argument(
        "--collect", action="store_true", help="start no run; collect from finished ones"
    )
    arguments = parser.parse_args()
    commit = str(provenance(seed=0)["commit"])
    if commit == "None" or "+" in commit:
        parser.error(f"the commit is {commit}. Commit all changes, so that results can name it.")
    runs = all_runs()
    wanted = {n: experiment(n) for n in ([arguments.name] if arguments.name in known else known)}
    for one in wanted.values():
        if status := make(one["runs"], runs, start=not arguments.collect):
            return status
    for name, one in wanted.items():  # last: these files make the commit unclean
        write_json(ROOT / f"results/experiments/{name}.json", collected(one, runs))
    return update_documents.update()


def experiment(name: str) -> dict[str, Any]:
    """Content of an experiment.toml."""
    found = tomllib.loads((ROOT / "experiments" / name / "experiment.toml").read_text("utf-8"))
    return found | {"runs": [run for named in found["runs"] for run in of_seeds(named)]}


def all_runs() -> dict[str, Run]:
    """Every run by name; a run with `{seed}` in its command comes once for each seed."""
    runs = dict[str, Run]()
    for name, entry in tomllib.loads((ROOT / "experiments/runs.toml").read_text("utf-8")).items():
        text = json.dumps({"needs": []} | entry)
        names = of_seeds(f"{name}_{{seed}}" if "{seed}" in entry["command"] else name)
        runs |= dict(zip(names, map(json.loads, of_seeds(text)), strict=False))
    return runs


def of_seeds(text: str) -> list[str]:
    """The text once for each seed, if it contains `{seed}`."""
    return list(dict.fromkeys(text.replace("{seed}", str(seed)) for seed in SEEDS))


def make(wanted: list[str], runs: dict[str, Run], *, start: bool) -> int:
    """Make the missing runs: exit status of the first that failed; 0: all are finished."""
    for name in in_order(wanted, runs):
        if done_file(name, runs[name]).exists():
            continue
        status = started(name, runs[name]) if start else 1
        if status and not done_file(name, runs[name]).exists():
            print(f"{name} is not finished: status {status}")
            return status
    return 0


def in_order(wanted: list[str], runs: dict[str, Run]) -> list[str]:
    """The wanted runs and those that they need, each after its needs."""
    order: list[str] = []
    for name in wanted:
        order += [n for n in [*in_order(runs[name]["needs"], runs), name] if n not in order]
    return order


def started(name: str, run: Run) -> int:
    """Start a run's command, and return its exit status."""
    words = command_of(name, run)
    print(f"{name}: {' '.join(words)}", flush=True)
    module = {"dotmoe": ["-m", "dotmoe"], "python": []}[words[0]]
    return subprocess.run([sys.executable, *module, *words[1:]], cwd=ROOT, check=False).returncode


def command_of(name: str, run: Run) -> list[str]:
    """The words of a run's command, with the folders filled in."""
    places = {other: f"experiments/runs/{other}" for other in [*run["needs"], name]}
    return shlex.split(run["command"].format(out=places[name], **places))


def done_file(name: str, run: Run) -> Path:
    """File that exists once a run is finished; it may be in the folder of a run that it extends."""
    return Path(os.path.normpath(RUNS / name / run["done"]))


def collected(asked: dict[str, Any], runs: dict[str, Run]) -> dict[str, Any]:
    """Content of the result file of an experiment, from the files of its runs."""
    found: dict[tuple[str, str], list[float]] = {}
    tables = []
    for table in asked["table"]:
        rows = dict[str, dict[str, list[float]]]()
        for row, file in table["rows"].items():
            place = ROOT if file.startswith("results/") else RUNS
            contents = [records.load(place / each) for each in of_seeds(file)]
            rows[row] = {
                column: [
                    records.value(expression, {**content, "row": row, "seed": seed})
                    for seed, content in enumerate(contents)
                ]
                for column, expression in table["columns"].items()
            }
            found |= {(row, column): values for column, values in rows[row].items()}
        ends = {
            row: {column: [min(v), max(v)] for column, v in cells.items() if v[1:]}
            for row, cells in rows.items()
        }
        means = {row: {c: mean(v) for c, v in cells.items()} for row, cells in rows.items()}
        about = {"title": table.get("title", ""), "files": table["rows"]}
        tables.append({**about, "rows": means, "spreads": ends})
    shows = []
    for one in asked["shows"]:
        by_seed = [found[tuple(n)] if isinstance(n, list) else [n, n] for n in one["less"]]
        said = {"numbers": [mean(v) for v in by_seed], "verdict": verdict(by_seed)}
        shows.append({"text": one["text"], **said, "expected": one.get("expected")})
    return {
        "label": asked["label"],
        "origin": "measured",
        "tables": tables,
        "shows": shows,
        "runs": {name: made_by(name, runs[name]) for name in in_order(asked["runs"], runs)},
        "provenance": provenance(seed=0),
    }


def mean(values: list[float]) -> float:
    """Mean over seeds; equal values stay as they are, whole numbers too."""
    return fmean(values) if len({*values}) > 1 else values[0]


def verdict(by_seed: list[list[float]]) -> str:
    """Whether each number is below the next, given its values of all seeds; one seed tells nothing.

    A difference within the spread of the seeds is inconclusive; others are confirmed if each number
    is below the next, and contradicted if one is not.
    """
    if any(len(values) == 1 for values in by_seed):
        return "inconclusive"
    verdicts = {_verdict_of(lower, upper) for lower, upper in pairwise(by_seed)}
    for said in ("contradicted", "inconclusive"):
        if said in verdicts:
            return said
    return "confirmed"


def _verdict_of(lower: list[float], upper: list[float]) -> str:
    """Whether the first number is below the second, given the values of all seeds of both."""
    rise = fmean(upper) - fmean(lower)
    spread = max(max(lower) - min(lower), max(upper) - min(upper))
    if rise == 0 and spread == 0:
        return "contradicted"
    if rise < 0 and -rise >= spread:
        return "contradicted"
    return "inconclusive" if abs(rise) <= spread else "confirmed"


def made_by(name: str, run: Run) -> dict[str, Any]:
    """Recorded command and provenance of a run; without a record, the current command."""
    made = read_json(done_file(name, run)).get("provenance")
    recorded = (made or {}).get("command")
    command = recorded or shlex.join(command_of(name, run))
    return {"command": command, "is_recorded": recorded is not None, "provenance": made}


if __name__ == "__main__":
    sys.exit(main())
