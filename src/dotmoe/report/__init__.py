"""Report: result files in, tables, plots and words out. Nothing is computed again.

Here the result files of a run are read, once for its report. What was not measured is absent.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dotmoe.errors import UserError
from dotmoe.evaluate.tasks import is_share
from dotmoe.files import DamagedError, Values, read_json, read_with_checksum
from dotmoe.run_folder import STAGES


class RunResults:
    """Contents of the result files of a finished run, or of a quickstart with both of its splits.

    Raises a `UserError`: no run, not finished, or a damaged file.
    """

    def __init__(self, folder: Path) -> None:
        self.quickstart: Values = {}
        """`quickstart.json` of the folder that holds the run, where the report is of that."""
        if (folder / "quickstart.json").is_file():
            self.quickstart, folder = _object(folder / "quickstart.json"), folder / "dot_moe"
        needed = {"config.json": "is no run folder", "6_evaluate/results.json": "is not finished"}
        for file, lack in needed.items():
            if not (folder / file).is_file():
                raise UserError(
                    f"{folder} {lack}: it has no {file}. Name a folder in which dotmoe convert, "
                    "finetune or quickstart has come to its end."
                )
        if (folder / STAGES["prune"]).is_dir():
            raise UserError(
                f"{folder} was pruned, of which there is no report. See compare.md beside."
            )
        self.run = folder
        self.config = _object(folder / "config.json")
        record, evaluated = folder / "5_export" / "dotmoe.json", folder / "6_evaluate"
        self.export = _object(record) if record.is_file() else {}
        """`5_export/dotmoe.json`; empty where there is none."""
        self.files = {
            path.relative_to(evaluated).with_suffix("").as_posix(): _object(path)
            for path in sorted(evaluated.rglob("*.json"))
        }
        """Every file of `6_evaluate`, by its path there without `.json`, as `tasks/piqa`."""
        self.results = self.files["results"]
        """Perplexities, counts and checks that every run has."""
        self.steps = {
            "alignment": _steps(folder / "2_align" / "metrics.jsonl"),
            "finetune": _steps(folder / "4_finetune" / "metrics.jsonl"),
        }
        """Metrics of each step of the trainings in the run."""
        self.is_finetuned = "finetune" in self.config
        """Whether `dotmoe finetune` made the run, and not `convert`."""
        train = self.config.get("finetune", {}).get("train")
        self.is_repaired = bool(train == "repair" or self.config.get("repair"))
        """Whether the exported model was repaired, and nothing changed afterwards."""
        self.source = str(self.config["run" if self.is_finetuned else "model"])
        """What was converted or finetuned, as the user named it."""
        self.dense_model = str(self.export.get("source", self.source))
        """Name of the dense model that all comparisons are with."""
        method = str(self.config.get("method", "dot_moe")).replace("dot_moe", "DOT-MoE")
        self.name = "repaired" if self.is_repaired else "finetuned" if self.is_finetuned else method
        """What the report calls the exported model."""

    @property
    def models(self) -> dict[str, Values]:
        """Perplexity of each model on the run's held-out text, the dense one first."""
        found = {
            "dense": self.results["dense"],
            "random split, router trained": self.quickstart.get("random_split"),
            "random split, repaired": self.quickstart.get("random_split_repaired"),
            **{name: self.results.get(name) for name in ("frozen", "converted", "repaired")},
            self.name: self.results["moe"],
            "under the method's own router": self.results.get("moe_own_router"),
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
        """Raise a `UserError` where what is read of `file` is not in it, or of another type."""
        try:
            yield
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self.run / file} lacks what the report shows of it ({type(error).__name__}: "
                f"{error}): it is damaged, or of another version. Delete it, and measure it again."
            ) from error


def _object(path: Path) -> Values:
    try:
        values = read_json(path)
        return read_with_checksum(path) if "sha256" in values else values
    except DamagedError as error:
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
