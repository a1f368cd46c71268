"""The result files of a run, read once for its report; what is not there is None."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dotmoe.errors import UserError
from dotmoe.sealed_json import SEAL, DamagedError, any_object, require_seal

Values = dict[str, Any]
Names = tuple[str, ...]

ANALYSES = (
    "expert_utilisation",
    "routing_overlap",
    "expert_outputs_tsne",
    "alignment_history",
    "overhead_profile",
)
"""Names of the analyses that a report shows."""

MEASUREMENTS = ("perplexity", "word_perplexity", "curve", "fidelity", "generation", "bench")
"""Files of `6_evaluate` that are there when somebody asked for them."""

_EVALUATED = "6_evaluate"


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultFiles:
    """Contents of the result files of one run."""

    run: Path
    """The run folder, as it was named."""
    kind: Literal["convert", "finetune"]
    config: Values
    results: Values
    """`6_evaluate/results.json`."""
    export: Values | None
    """`5_export/dotmoe.json`."""
    alignment: list[Values]
    """Metrics of each step of the alignment; empty where there was none."""
    recovery: list[Values]
    """Metrics of each step of recovery training; empty where there was none."""
    tasks: dict[str, dict[str, Values]]
    """Results of benchmark tasks by name, of `model` and of `against`."""
    measured: dict[str, Values]
    """Those of `MEASUREMENTS` that are there."""
    analyses: dict[str, Values]
    """Those of `ANALYSES` that are there."""
    quickstart: Values | None = None
    """`quickstart.json` of the folder that the run lies in, where the page is of that."""
    files: dict[str, Values] = field(default_factory=dict)
    """Every result file by its path in the run folder, for the provenance."""

    @property
    def models(self) -> dict[str, Values]:
        """Perplexity of each model on the run's held-out text, the dense one first."""
        found = {"dense": self.results["dense"]}
        if self.quickstart is not None:
            found["random split, router trained"] = self.quickstart["random_split"]
        if "converted" in self.results:
            found["converted"] = self.results["converted"]
        return found | {self.name: self.results["moe"]}

    @property
    def name(self) -> str:
        """What the page calls the exported model."""
        if self.kind == "finetune":
            return "finetuned"
        method = str(self.config.get("method", "dot_moe"))
        return "DOT-MoE" if method == "dot_moe" else method

    @property
    def source(self) -> str:
        """What was converted, as it was named."""
        key = "run" if self.kind == "finetune" else "model"
        return str(self.config[key])

    @property
    def dense_model(self) -> str | None:
        """Name of the dense model, if it is known."""
        if self.kind == "convert":
            return self.source
        return None if self.export is None else str(self.export["source"])


def read_run(run: Path, quickstart: Values | None = None) -> ResultFiles:
    """Read the result files of a finished run.

    Args:
        run: Folder of `dotmoe convert` or `dotmoe finetune`.
        quickstart: Contents of `quickstart.json`, if the run is the quickstart's.

    Raises:
        UserError: No run, not finished yet, or a file that is damaged.
    """
    if not (run / "config.json").is_file():
        raise UserError(
            f"{run} is no run folder: it has no config.json. Name a folder that dotmoe convert, "
            "finetune or quickstart has written."
        )
    config = _object(run / "config.json")
    results = _optional(run / _EVALUATED / "results.json", _RESULTS_HAVE)
    kind: Literal["convert", "finetune"] = "finetune" if "finetune" in config else "convert"
    if results is None:
        raise UserError(
            f"{run} is not finished: it has no {_EVALUATED}/results.json. Repeat the dotmoe {kind} "
            "that began it."
        )
    folder = run / _EVALUATED
    measured = _present(folder, MEASUREMENTS)
    analyses = _present(folder / "analysis", ANALYSES, _ANALYSIS_HAS)
    tasks = {label: _all(folder / sub) for label, sub in _TASK_FOLDERS.items()}
    return ResultFiles(
        run=run,
        kind=kind,
        config=config,
        results=results,
        export=_optional(run / "5_export" / "dotmoe.json", _EXPORT_HAS + _EXPORT_HAS_WIDTHS),
        alignment=_lines(run / "2_align" / "metrics.jsonl"),
        recovery=_lines(run / "4_finetune" / "metrics.jsonl"),
        tasks=tasks,
        measured=measured,
        analyses=analyses,
        quickstart=quickstart,
        files={f"{_EVALUATED}/results.json": results}
        | {f"{_EVALUATED}/{name}.json": values for name, values in measured.items()}
        | {f"{_EVALUATED}/analysis/{name}.json": values for name, values in analyses.items()}
        | {
            f"{_EVALUATED}/{_TASK_FOLDERS[label]}/{name}.json": values
            for label, found in tasks.items()
            for name, values in found.items()
        },
    )


def read_quickstart(folder: Path) -> ResultFiles | None:
    """Result files of the DOT-MoE run of a quickstart; None where `folder` is no quickstart.

    Raises:
        UserError: See `read_run`.
    """
    summary = _optional(folder / "quickstart.json")
    if summary is None:
        return None
    for key in ("random_split", "dot_moe", "samples"):
        if key not in summary:
            raise UserError(
                f"{folder / 'quickstart.json'} has no {key}. Repeat dotmoe quickstart, which "
                "writes it anew."
            )
    return read_run(folder / "dot_moe", summary)


_RESULTS_HAVE = ("dense", "moe", "granularity", "parameters", "verification", "provenance")
_EXPORT_HAS = ("source", "format", "dtype", "servers", "total_bytes")
_EXPORT_HAS_WIDTHS = ("num_layers", "model_width", "active_experts")
_TASK_HAS = ("scores",)
_ANALYSIS_HAS = ("title", "tokens", "values")

_TASK_FOLDERS = {"model": "tasks", "against": "against"}


def _present(folder: Path, names: Names, needed: Names = ()) -> dict[str, Values]:
    found = {name: _optional(folder / f"{name}.json", needed) for name in names}
    return {name: values for name, values in found.items() if values is not None}


def _all(folder: Path) -> dict[str, Values]:
    return {path.stem: _object(path, _TASK_HAS) for path in sorted(folder.glob("*.json"))}


def _optional(path: Path, needed: Names = ()) -> Values | None:
    return _object(path, needed) if path.is_file() else None


def _object(path: Path, needed: Names = ()) -> Values:
    try:
        values = any_object(path)
        if SEAL in values:
            require_seal(path, values)
    except DamagedError as error:
        raise UserError(f"{error}. {_remedy(path)}") from error
    for name in needed:
        if name not in values:
            raise UserError(f"{path} has been altered: it has no {name}. {_remedy(path)}")
    values.pop(SEAL, None)
    return values


def _lines(path: Path) -> list[Values]:
    if not path.is_file():
        return []
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines()):
        try:
            values = json.loads(line)
        except ValueError as error:
            raise UserError(
                f"{path} is truncated or altered: line {number + 1} is no JSON. {_remedy(path)}"
            ) from error
        if not isinstance(values, dict) or "step" not in values:
            raise UserError(
                f"{path} has been altered: line {number + 1} is no step. {_remedy(path)}"
            )
        found.append(values)
    return found


def _remedy(path: Path) -> str:
    name = re.sub(r"^\d_", "", path.parent.name)
    if path.name in ("results.json", "metrics.jsonl", "dotmoe.json"):
        stage = path.parent.parent / "finished" / name
        return f"Delete {stage} and repeat the command of the run, which then makes it again."
    return "Delete it, and measure it again."
