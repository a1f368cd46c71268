"""The result files of a run, read once for its report. What was not measured is absent."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dotmoe.errors import UserError
from dotmoe.files import DamagedError, Values, read_json, read_with_checksum
from dotmoe.report.tables import is_share
from dotmoe.run_folder import STAGES


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResults:
    """Contents of the result files of one run."""

    run: Path
    """The run folder, as the user named it."""
    config: Values
    export: Values
    """`5_export/dotmoe.json`; empty where there is none."""
    files: dict[str, Values]
    """Every file of `6_evaluate`, by its path there without `.json`: `results`, `tasks/piqa`."""
    steps: dict[str, list[Values]]
    """Metrics of each step of the trainings in the run: `alignment`, `finetune`."""
    quickstart: Values
    """`quickstart.json` of the folder that holds the run, where the report is of that."""

    @property
    def results(self) -> Values:
        """Perplexities, counts and checks that every run has: `6_evaluate/results.json`."""
        return self.files["results"]

    @property
    def is_finetuned(self) -> bool:
        """Whether `dotmoe finetune` made the run, and not `convert`."""
        return "finetune" in self.config

    @property
    def is_repaired(self) -> bool:
        """Whether the exported model was repaired, and nothing changed afterwards."""
        return bool(
            self.config.get("finetune", {}).get("train") == "repair" or (self.config.get("repair"))
        )

    @property
    def source(self) -> str:
        """What was converted or finetuned, as the user named it."""
        return str(self.config["run" if self.is_finetuned else "model"])

    @property
    def dense_model(self) -> str:
        """Name of the dense model that all comparisons are with."""
        return str(self.export.get("source", self.source))

    @property
    def name(self) -> str:
        """What the report calls the exported model."""
        method = str(self.config.get("method", "dot_moe")).replace("dot_moe", "DOT-MoE")
        return "repaired" if self.is_repaired else "finetuned" if self.is_finetuned else method

    @property
    def models(self) -> dict[str, Values]:
        """Perplexity of each model on the run's held-out text, the dense one first."""
        results = self.results
        found = {
            "dense": results["dense"],
            "random split, router trained": self.quickstart.get("random_split"),
            "random split, repaired": self.quickstart.get("random_split_repaired"),
            "frozen": results.get("frozen"),
            "converted": results.get("converted"),
            "repaired": results.get("repaired"),
            self.name: results["moe"],
            "under the method's own router": results.get("moe_own_router"),
        }
        return {name: result for name, result in found.items() if result}

    def label(self, model: str) -> str:
        """What the report calls a model that a measurement names."""
        return "dense" if model == self.dense_model else model

    def sides(self, result: Values) -> dict[str, Values]:
        """The models of a measurement by what the report calls them, the other one first."""
        names = {"against": self.label(str(result.get("against", {}).get("name", "")))}
        names["model"] = self.name
        return {name: result[side] for side, name in names.items() if side in result}

    def tasks(self, side: str) -> list[Values]:
        """Files of the benchmark tasks of `tasks` (this model) or `against` (the other one)."""
        return [found for name, found in self.files.items() if name.startswith(f"{side}/")]

    def scores(self, side: str) -> list[Values]:
        """Rows of all those tasks."""
        with self.reading(f"6_evaluate/{side}"):
            return [score for found in self.tasks(side) for score in found["scores"]]

    @property
    def against(self) -> str:
        """What the report calls the other model of the benchmark tasks."""
        return next((self.label(str(t["model"]["name"])) for t in self.tasks("against")), "dense")

    def main_scores(self) -> tuple[list[Values], list[Values]]:
        """Scores of the other model and of this one that its average is of, in the same tasks.

        Those of the paper's tasks, as `dotmoe evaluate` averages them; without any, the main score
        of every task that is a share of right answers.
        """
        scores = self.scores("tasks")
        own = [score for score in scores if "paper" in score["sets"]]
        own = own or [score for score in scores if score["is_main"] and is_share(score)]
        others = {(each["task"], each["metric"]): each for each in self.scores("against")}
        keys = [(score["task"], score["metric"]) for score in own]
        return [others[key] for key in keys if key in others], own

    @contextmanager
    def reading(self, file: str) -> Iterator[None]:
        """Say in one line that a result file is not as this version writes it.

        Raises:
            UserError: Something that is read from `file` is not in it, or is of another type.
        """
        try:
            yield
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self.run / file} lacks what the report shows of it ({type(error).__name__}: "
                f"{error}): it is damaged, or of another version. Delete it, and measure it again."
            ) from error


def read_run(folder: Path) -> RunResults:
    """Read the result files of a finished run, or of a quickstart with both of its splits.

    Raises:
        UserError: No run, not finished, or a damaged file.
    """
    quickstart = {}
    if (folder / "quickstart.json").is_file():
        quickstart, folder = _object(folder / "quickstart.json"), folder / "dot_moe"
    for file, lack in {
        "config.json": "is no run folder",
        "6_evaluate/results.json": "is not finished",
    }.items():
        if not (folder / file).is_file():
            raise UserError(
                f"{folder} {lack}: it has no {file}. Name a folder in which dotmoe convert, "
                "finetune or quickstart has come to its end."
            )
    if (folder / STAGES["prune"]).is_dir():
        raise UserError(f"{folder} was pruned, of which there is no report. See compare.md beside.")
    evaluated, record = folder / "6_evaluate", folder / "5_export" / "dotmoe.json"
    trainings = {"alignment": folder / "2_align", "finetune": folder / "4_finetune"}
    return RunResults(
        run=folder,
        config=_object(folder / "config.json"),
        export=_object(record) if record.is_file() else {},
        files={
            path.relative_to(evaluated).with_suffix("").as_posix(): _object(path)
            for path in sorted(evaluated.rglob("*.json"))
        },
        steps={name: _steps(stage / "metrics.jsonl") for name, stage in trainings.items()},
        quickstart=quickstart,
    )


def _object(path: Path) -> Values:
    try:
        values = read_json(path)
        return read_with_checksum(path) if "sha256" in values else values
    except (UserError, DamagedError) as error:
        measured = "6_evaluate" in path.parts and path.name != "results.json"
        again = "measure it again" if measured else "repeat the command of the run"
        raise UserError(f"{str(error).rstrip('.')}. Delete it, and {again}.") from error


def _steps(path: Path) -> list[Values]:
    lines = path.read_bytes().splitlines() if path.is_file() else []
    try:
        return [{"step": None, **json.loads(line)} for line in lines]
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{path} is truncated or altered. Delete {path.parent} and repeat the command of the "
            "run, which makes it again."
        ) from error
