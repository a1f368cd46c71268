"""Report: shows result files as tables, sentences and one picture. It computes no result again.

This module reads the result files of a run, once per report. What was not measured is absent.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dotmoe.common.errors import UserError
from dotmoe.common.files import DamagedError, Values, read_json, read_with_checksum
from dotmoe.measure.evaluate.tasks import of_model
from dotmoe.run.folder import STAGES, RunFolder


class RunResults:
    """Contents of the result files of a finished run, or of a quickstart with both of its runs.

    Raises a `UserError` if the folder holds no finished run, or if a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.quickstart: Values = {}
        """Contents of `quickstart.json`; empty unless the report is about a quickstart."""
        if (folder / "quickstart.json").is_file():
            self.quickstart, folder = _object(folder / "quickstart.json"), folder / "dot_moe"
        for file in ("config.json", "6_evaluate/results.json"):
            if not (folder / file).is_file():
                raise UserError(
                    f"{folder} is no finished run: it has no {file}. Name a folder in which dotmoe "
                    "convert, finetune or quickstart has finished."
                )
        if (folder / STAGES["prune"]).is_dir():
            raise UserError(
                f"{folder} was pruned; such a run has no report. See compare.md one folder up."
            )
        self.folder = folder
        self.config = _object(folder / "config.json")
        record, evaluated = folder / "5_export" / "dotmoe.json", folder / "6_evaluate"
        self.export = _object(record) if record.is_file() else {}
        """Contents of `5_export/dotmoe.json`; empty if there is no such file."""
        self.files = {
            path.relative_to(evaluated).with_suffix("").as_posix(): _object(path)
            for path in sorted(evaluated.rglob("*.json"))
        }
        """Contents of each JSON file in `6_evaluate`, by path without `.json`: `tasks/piqa`."""
        self.results = self.files["results"]
        stages = {"alignment": "2_align", "finetune": "4_finetune"}
        self.steps = {name: _steps(folder / at / "metrics.jsonl") for name, at in stages.items()}
        """Metrics of each step of the alignment and of the finetuning, by name."""
        self.is_finetuned = "finetune" in self.config
        with self.reading("config.json"):
            self.source = str(self.config["run" if self.is_finetuned else "model"])
            """The model that was converted or the run that was finetuned, as the user named it."""
        self.is_repaired = bool(self.config.get("repair"))
        """Whether the exported model was repaired and not finetuned afterwards."""
        run = RunFolder(folder)
        self.dense_model = run.model if run.exists else self.source
        """Name of the dense model that every comparison refers to."""
        is_papers = self.config.get("calibrate", {}).get("start") == "random"
        ours = "DOT-MoE (paper)" if is_papers else "dotmoe"
        method = str(self.config.get("method", "dot_moe")).replace("dot_moe", ours)
        self.name = "repaired" if self.is_repaired else "finetuned" if self.is_finetuned else method
        """Name of the exported model in the report."""

    @property
    def models(self) -> dict[str, Values]:
        """Perplexity of each model on the run's held-out text, the dense one first."""
        if self.quickstart:
            with self.reading("../quickstart.json"):
                return quickstart_models(self.quickstart)
        results = {
            "dense": self.results["dense"],
            **{name: self.results.get(name) for name in ("frozen", "converted", "repaired")},
            self.name: self.results["moe"],
            "under the method's own router": self.results.get("moe_own_router"),
        }
        return {name: result for name, result in results.items() if result}

    def named(self, result: Values) -> Values:
        """A measurement with its one or two models named as the report names them."""
        dense = dict.fromkeys((self.dense_model, self.dense_model.partition("@")[0]), "dense")
        named = result | {"name": dense.get(result.get("name", ""), self.name)}
        for side in ("model", "against"):
            if isinstance(one := result.get(side), dict):
                name = dense.get(one["name"], self.name if side == "model" else one["name"])
                named[side] = one | {"name": name}
        return named

    @property
    def tasks(self) -> Values:
        """Results of the benchmark tasks, in the form that `dotmoe evaluate` uses."""
        sides = Values()
        for side, folder in (("against", "against/"), ("model", "tasks/")):
            files = [file for name, file in self.files.items() if name.startswith(folder)]
            if files:
                with self.reading(f"6_evaluate/{folder}"):
                    sides[side] = of_model(files[0]["model"]["name"], files)
        return self.named(sides)

    @contextmanager
    def reading(self, file: str) -> Iterator[None]:
        """Within this context, a missing or mistyped value of `file` raises a `UserError`."""
        try:
            yield
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self.folder / file} lacks a value of the report ({type(error).__name__}: "
                f"{error}): it is damaged or from another version. {_remedy(self.folder / file)}"
            ) from error


def quickstart_models(result: Values) -> dict[str, Values]:
    """Perplexity of each model of `quickstart.json` by its name in tables."""
    return {
        "dense": result["dense"],
        "dotmoe, start": result["dotmoe_start"],
        "dotmoe, repaired": result["dotmoe"],
        "static pruning, same repair": result["static_pruning"],
    }


def _object(path: Path) -> Values:
    try:
        values = read_json(path)
        return read_with_checksum(path) if "sha256" in values else values
    except DamagedError as error:
        raise UserError(f"{str(error).rstrip('.')}. {_remedy(path)}") from error


def _remedy(path: Path) -> str:
    is_of_run = "6_evaluate" not in path.parts or path.name == "results.json"
    return f"Delete it and {'repeat the command of the run' if is_of_run else 'measure it again'}."


def _steps(path: Path) -> list[Values]:
    lines = path.read_bytes().splitlines() if path.is_file() else []
    try:
        return [{"step": None, **json.loads(line)} for line in lines]
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{path} is truncated or altered. Delete {path.parent} and repeat the command of the "
            "run, which makes it again."
        ) from error
