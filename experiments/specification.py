"""The files of an experiment, parsed: experiment.toml, quoted.json and runs.toml."""

import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"

SEEDS = range(3)
"""Seeds that replace `{seed}`."""

Status = Literal["run", "partly run", "not run", "not built"]
Verdict = Literal["shows", "does not show", "undecided"]

STATUSES = {
    "run": "the scaled recipe has been run; its result is in results/",
    "partly run": "a part of the scaled recipe has been run; see below for the rest",
    "not run": "the code for it exists, but it has not been run",
    "not built": "dotmoe has no code for it",
}


@dataclass(frozen=True, kw_only=True)
class Source:
    """A table of numbers collected from result files: one file per row, one key per column."""

    rows: dict[str, str]
    """Row -> file: `RUN/...` of a run, or `results/...`; with `{seed}`, one file per seed."""
    columns: dict[str, str]
    """Column -> place in the file, such as `points[step=30].loss`; `{row}` stands for the row,
    `{first}` for its first word, `{seed}` for the seed; ` or ` joins alternatives, and the first
    that exists counts."""
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A number that a repetition should reproduce."""

    row: str
    column: str
    value: float
    tolerance: float
    """Largest relative difference."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A finding of the paper as an order of numbers, and the verdict expected at small scale."""

    text: str
    less: list[list[str] | float]
    """Numbers in ascending order: [row, column] of a measured one, or a plain number."""
    expected: Verdict | None = None
    """Expected verdict; None if it was not run yet."""

    def numbers(self, measured: dict[tuple[str, str], float]) -> list[float]:
        """The compared numbers, given the measured ones by row and column."""
        return [
            measured[place[0], place[1]] if isinstance(place, list) else place
            for place in self.less
        ]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One table or figure of the paper."""

    label: str
    title: str
    status: Status
    """Status once its runs are finished."""
    claim: str
    paper_recipe: str
    """Models, commands, hours and hardware at the paper's scale."""
    scaled_recipe: str
    """What differs at the scale that runs here, and why."""
    finding: str
    """The result in words, or why nothing was run."""
    runs: list[str] = field(default_factory=list)
    """Names in runs.toml; runs that they need are included."""
    table: list[Source] = field(default_factory=list)
    expected: list[Expected] = field(default_factory=list)
    shows: list[Comparison] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of its folder, and stem of its result file."""
        return folder_name(self.label)

    @property
    def folder(self) -> Path:
        return HERE / self.name

    @property
    def result_file(self) -> Path:
        return RESULTS / "experiments" / f"{self.name}.json"

    @property
    def reached(self) -> Status:
        """Current status: `not run` as long as there is no result."""
        return "not run" if self.table and not self.result_file.is_file() else self.status

    def result(self) -> dict[str, Any] | None:
        """Contents of the result file, or None if nothing was measured."""
        return _json(self.result_file)

    def quoted(self) -> dict[str, Any] | None:
        """The paper's values, or None if none are quoted."""
        return _json(self.folder / "quoted.json")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One entry of runs.toml."""

    command: str
    done: str
    """JSON file in the run's folder that exists once all that is needed of it is finished."""
    needs: list[str] = field(default_factory=list)


def folder_name(label: str) -> str:
    """The file name of a label: `tab:same_granularity` is tab_same_granularity."""
    return label.replace(":", "_")


def of_seeds(text: str) -> list[str]:
    """The text once for each seed, if it contains `{seed}`."""
    return list(dict.fromkeys(text.replace("{seed}", str(seed)) for seed in SEEDS))


def load_experiment(folder: Path) -> Experiment:
    values = _toml(folder / "experiment.toml")
    values["runs"] = [name for entry in values.get("runs", []) for name in of_seeds(entry)]
    values["table"] = [Source(**entry) for entry in values.get("table", [])]
    values["expected"] = [Expected(**entry) for entry in values.get("expected", [])]
    values["shows"] = [Comparison(**entry) for entry in values.get("shows", [])]
    return Experiment(**values)


def all_experiments() -> list[Experiment]:
    """Every experiment, sorted by label."""
    found = [load_experiment(file.parent) for file in HERE.glob("*/experiment.toml")]
    return sorted(found, key=lambda experiment: experiment.label)


def all_runs() -> dict[str, Run]:
    """Every run by name; a run with `{seed}` in its command comes once for each seed."""
    runs = {}
    for name, values in _toml(HERE / "runs.toml").items():
        names = of_seeds(f"{name}_{{seed}}" if "{seed}" in values["command"] else name)
        for seed, each in zip(SEEDS, names, strict=False):
            text = json.dumps(values).replace("{seed}", str(seed))
            runs[each] = Run(**json.loads(text))
    return runs


def _toml(file: Path) -> dict[str, Any]:
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _json(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return values
