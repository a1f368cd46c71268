"""What the files of an experiment say: experiment.toml, quoted.json and runs.toml, checked."""

import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"

SEEDS = range(3)
"""What `{seed}` stands for."""

Status = Literal["run", "partly run", "not run", "not built"]
Verdict = Literal["shows", "does not show", "undecided"]

STATUSES = {
    "run": "the scaled recipe has been run; its result is in results/",
    "partly run": "a part of the scaled recipe has been run; the rest is said below",
    "not run": "what it takes is built, and has not been run",
    "not built": "what it takes is not in dotmoe",
}


@dataclass(frozen=True, kw_only=True)
class Source:
    """A table of numbers collected from result files: a file a row, a key a column."""

    rows: dict[str, str]
    """Row -> file: `RUN/...` of a run, or `results/...`; with `{seed}` one a seed."""
    columns: dict[str, str]
    """Column -> place in the file, such as `points[step=30].loss`; `{row}` stands for the row,
    `{first}` for its first word, `{seed}` for the seed; ` or ` joins places of which the first that
    is there counts."""
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A number that a repeat should give."""

    row: str
    column: str
    value: float
    tolerance: float
    """Largest relative difference."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A finding of the paper as an order of numbers, and what is expected of it at small scale."""

    text: str
    less: list[list[str] | float]
    """Numbers, each to be below the next: [row, column] of measured ones, or a plain number."""
    expected: Verdict | None = None
    """None: nothing, it was not run yet."""

    def numbers(self, measured: dict[tuple[str, str], float]) -> list[float]:
        """What is compared, given the measured numbers by row and column."""
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
    """What it is when its runs are finished."""
    claim: str
    paper_recipe: str
    """Models, commands, hours and hardware at the paper's scale."""
    scaled_recipe: str
    """What is different here, and why."""
    finding: str
    """What came out, in words; or why nothing was run."""
    runs: list[str] = field(default_factory=list)
    """Names in runs.toml; what they need comes with them."""
    table: list[Source] = field(default_factory=list)
    expected: list[Expected] = field(default_factory=list)
    shows: list[Comparison] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its folder, and the stem of its result file."""
        return folder_name(self.label)

    @property
    def folder(self) -> Path:
        return HERE / self.name

    @property
    def result_file(self) -> Path:
        return RESULTS / "experiments" / f"{self.name}.json"

    @property
    def reached(self) -> Status:
        """What it is now: `not run` as long as there is no result."""
        return "not run" if self.table and not self.result_file.is_file() else self.status

    def result(self) -> dict[str, Any] | None:
        """What was measured, if it was."""
        return _json(self.result_file)

    def quoted(self) -> dict[str, Any] | None:
        """The paper's values, if some are quoted."""
        return _json(self.folder / "quoted.json")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One entry of runs.toml."""

    command: str
    done: str
    """JSON file in the run's folder that is there when all of it that is wanted is finished."""
    needs: list[str] = field(default_factory=list)


def folder_name(label: str) -> str:
    """A label as a name of a file: `tab:same_granularity` is tab_same_granularity."""
    return label.replace(":", "_")


def of_seeds(text: str) -> list[str]:
    """A text once for each seed, if it has a place for one."""
    return list(dict.fromkeys(text.replace("{seed}", str(seed)) for seed in SEEDS))


def load_experiment(folder: Path) -> Experiment:
    values = _toml(folder / "experiment.toml")
    values["runs"] = [name for entry in values.get("runs", []) for name in of_seeds(entry)]
    values["table"] = [Source(**entry) for entry in values.get("table", [])]
    values["expected"] = [Expected(**entry) for entry in values.get("expected", [])]
    values["shows"] = [Comparison(**entry) for entry in values.get("shows", [])]
    return Experiment(**values)


def all_experiments() -> list[Experiment]:
    """Every experiment, by label."""
    found = [load_experiment(file.parent) for file in HERE.glob("*/experiment.toml")]
    return sorted(found, key=lambda experiment: experiment.label)


def all_runs() -> dict[str, Run]:
    """Every run by name, one with `{seed}` in its command once for each seed."""
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
