"""Reads the result files of a run, once per report. What was not measured is absent."""

import json
import re
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dotmoe.common.errors import UserError
from dotmoe.common.files import DamagedError, Values, read_json
from dotmoe.common.options import values_of
from dotmoe.export.parameters import active_at
from dotmoe.export.record import ExportRecord
from dotmoe.measure.evaluate.tasks import summary_of_model
from dotmoe.method.granularity import from_record
from dotmoe.models.config import is_gguf
from dotmoe.models.identity import FINGERPRINT, fingerprint
from dotmoe.run.config import PAPER
from dotmoe.run.folder import RunFolder

RIVALS = "rivals"
"""File of `6_evaluate` with the perplexity of other models of as many active parameters, by name,
on the run's held-out text."""

_MEASURED = (
    "perplexity",
    "tasks",
    "against",
    "fidelity",
    "generation",
    "curve",
    "bench",
    "analysis",
)
"""Files and folders of `6_evaluate` with results of commands that measure."""

ACTIVE_PARAMETERS = "active_parameters"
"""Key of a result whose parameters for a token are not those of the run's export."""
_REMEDY = "Delete it and measure it again."


class RunResults:
    """Contents of the result files of a finished run.

    Raises a `UserError` if the folder holds no finished run, or if a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        run = _finished_run(folder)
        self.folder = folder
        self.config = run.manifest["config"]
        self.export = ExportRecord.load(run.path_of("export"))
        evaluated = run.verified("evaluate")
        self.files = {
            path.relative_to(evaluated).with_suffix("").as_posix(): _object(path)
            for path in sorted(evaluated.rglob("*.json"))
        }
        """Contents of each JSON file in `6_evaluate`, by path without `.json`: `tasks/piqa`; those
        in `of_others` are left out."""
        self.results = self.files["results"]
        self.splits = from_record(self.results["granularity"])
        self.steps = {name: _steps(run.path_of(name)) for name in ("align", "finetune")}
        """Metrics of each step of the alignment and of the finetuning."""
        self.is_finetuned = run.manifest["command"] == "finetune"
        self.source: str = self.config["run"] if self.is_finetuned else run.model
        """The run that was finetuned, or the model that was converted, with its hub commit."""
        self.is_repaired = bool(self.config.get("repair"))
        """Whether the exported model was repaired and not finetuned afterwards."""
        self.dense_model = run.model
        """Name of the dense model that every comparison refers to."""
        self.title: str = _title_of(run.manifest["model"])
        """Name of the dense model for people: of a path, its last part."""
        self.name = self._name()
        """Name of the exported model in the report."""
        exported = fingerprint(run.path_of("export"))
        dense = run.manifest["inputs"]["model"]
        self._exported_fingerprint = exported
        self._dense_fingerprint = dense
        self.is_edited = self.results["moe"].get(FINGERPRINT, exported) != exported
        """Whether somebody edited the export after the run had measured it."""
        known = {exported, dense, run.fingerprint_of(self._last_stage)}
        self.of_others = _of_others(self.files, known, (run.model, dense))
        """Names of the files that are left out: they measured another model, such as an earlier
        export of the run, or do not say which."""
        for name in self.of_others:
            del self.files[name]

    @property
    def _last_stage(self) -> str:
        """The stage that made the exported weights."""
        if self.is_finetuned:
            return "finetune"
        return "repair" if self.is_repaired else "extract"

    def _name(self) -> str:
        if self.is_repaired:
            trains = self.config.get("repairing", {}).get("repair_epochs", 1) > 0
            return "repaired" if trains else "refitted"
        if self.is_finetuned:
            return "finetuned"
        method: str = self.config.get("method", "dot_moe")
        if method != "dot_moe":
            return method
        return "DOT-MoE (paper)" if self._is_by_papers_recipe else "dotmoe"

    @property
    def _is_by_papers_recipe(self) -> bool:
        """Whether the model was aligned from a random start as in the paper, all experts routed."""
        papers = values_of(PAPER)
        chosen = (("calibrate", "start"), ("assignment", "solver"), ("align", "surrogate"))
        is_alike = all(
            self.config.get(part, {}).get(name) == papers[part][name] for part, name in chosen
        )
        first = self.splits[0]
        is_whole = not first.shared_size and not first.first_dense_layers
        return is_alike and is_whole and bool(self.results.get("steps"))

    @property
    def models(self) -> dict[str, Values]:
        """Perplexity of each model on the run's held-out text, the dense one first."""
        results = {
            "dense": self.results["dense"],
            "frozen": self.results.get("frozen") or self.results.get("converted"),
            "repaired": self.results.get("repaired"),
            self.name: self.results["moe"],
            "under the method's own router": self._under_own_router(),
            **self.files.get(RIVALS, {}),
        }
        return {name: result for name, result in results.items() if result}

    def _under_own_router(self) -> Values | None:
        """Perplexity under a router that no export holds, with the parameters that it runs."""
        measured: Values | None = self.results.get("moe_own_router")
        if measured is None:
            return None
        counts, share = self.results["parameters"], measured["active"]["mean"]
        active = active_at(share, self.splits[0], counts["dense"], counts["active"])
        return {**measured, ACTIVE_PARAMETERS: active}

    @property
    def own_answers(self) -> Values:
        """Closeness on held-out answers of the dense model, by the names of the report."""
        measured = self.results.get("own_answers", {})
        return {self.name if name == "moe" else name: each for name, each in measured.items()}

    @property
    def own_answers_curve(self) -> Values:
        """The export on those answers at several k; empty if it was not measured."""
        curve: Values = self.results.get("own_answers_curve", {})
        return curve

    def named(self, result: Values) -> Values:
        """A measurement with its one or two models named as the report names them."""
        named = result | {"name": self._name_of(result, self.name)}
        if isinstance(model := result.get("model"), dict):
            named["model"] = model | {"name": self._name_of(model, self.name)}
        if isinstance(against := result.get("against"), dict):
            named["against"] = against | {"name": self._name_of(against, against["name"])}
        return named

    def _name_of(self, measured: Values, otherwise: str) -> str:
        """What the report calls a model that was measured, by its fingerprint or name."""
        names_of_dense = (self.dense_model, self.dense_model.partition("@")[0])
        fingerprint_of_it = measured.get(FINGERPRINT)
        if measured.get("name") in names_of_dense or fingerprint_of_it == self._dense_fingerprint:
            return "dense"
        return self.name if fingerprint_of_it == self._exported_fingerprint else otherwise

    @property
    def tasks(self) -> Values:
        """Results of the benchmark tasks, in the form that `dotmoe evaluate` uses."""
        sides = Values()
        for side, folder in (("against", "against/"), ("model", "tasks/")):
            files = [file for name, file in self.files.items() if name.startswith(folder)]
            if files:
                with self.reading(f"6_evaluate/{folder}"):
                    asked = files[0]["model"]
                    sides[side] = summary_of_model(asked["name"], files)
                    sides[side][FINGERPRINT] = asked.get(FINGERPRINT)
        return self.named(sides)

    @contextmanager
    def reading(self, file: str) -> Iterator[None]:
        """Within this context, a missing or mistyped value of `file` raises a `UserError`."""
        try:
            yield
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self.folder / file} lacks a value of the report ({type(error).__name__}: "
                f"{error}): it is damaged or from another version. {_REMEDY}"
            ) from error


def active_parameters(result: Values, counts: Values) -> int:
    """Parameters of a converted model that work on a token."""
    if ACTIVE_PARAMETERS in result:
        return int(result[ACTIVE_PARAMETERS])
    return int(counts["active"])


def _finished_run(folder: Path) -> RunFolder:
    """The run in a folder; a `UserError` if it is not finished, or was pruned."""
    run = RunFolder(folder)
    if not run.has("evaluate"):
        raise UserError(
            f"{folder} is no finished run. Name a folder in which dotmoe convert or finetune "
            "has finished."
        )
    if run.has("prune"):
        raise UserError(
            f"{folder} was pruned; such a run has no report. See compare.md one folder up."
        )
    return run


def _title_of(model: str) -> str:
    """A model's name without the folders above it: of a snapshot in the hub's cache, `org/name`.

    >>> _title_of("/home/me/.cache/hub/models--org--name/snapshots/0a1b"), _title_of("org/name")
    ('org/name', 'org/name')
    >>> _title_of("models/SmolLM2.Q4_1.gguf"), _title_of("./qwen/"), _title_of("/mnt/m/llama-3")
    ('SmolLM2.Q4_1', 'qwen', 'llama-3')
    """
    if snapshot := re.search(r"models--([^/]+?)--([^/]+)/snapshots/", model):
        return "/".join(snapshot.groups())
    path = Path(model)
    if is_gguf(path):
        return path.stem
    is_hub_name = re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not model.startswith(".")
    if is_hub_name and not path.exists():
        return model
    return path.name or model


def _of_others(
    files: Mapping[str, Values], known: Container[Any], dense: tuple[str, str]
) -> list[str]:
    """Names of results of a model without a `known` fingerprint.

    `dense`: name and fingerprint of the dense model, which must be what a result beside that name
    is of, and what closeness and speed are beside. Tasks in `against` are all of one model: of the
    dense one if it was asked any.
    """
    beside = {
        name: _fingerprint_in(content, "model")
        for name, content in files.items()
        if name.startswith("against/")
    }
    asked = dense[1] if dense[1] in beside.values() else next(iter(beside.values()), None)
    left_out = []
    for name, content in files.items():
        if name in beside:
            is_other = beside[name] != asked
        else:
            is_other = _fingerprint_in(content, "model") not in known
            if name in _BESIDE_DENSE or _name_of_other(content) == dense[0]:
                is_beside_other = _fingerprint_in(content, "against") != dense[1]
                is_other = is_other or is_beside_other
        if is_other and name.partition("/")[0] in _MEASURED:
            left_out.append(name)
    return left_out


_BESIDE_DENSE = ("fidelity", "bench")
"""Results whose sections of the report are about the distance to the dense model."""
_OF_BENCH = {"model": "moe", "against": "dense"}
"""What a speed measurement calls the two models."""


def _fingerprint_in(content: Values, side: str) -> Any:
    """Fingerprint of the `model` of a result file, or of `against`; None if it does not say."""
    for name in (side, _OF_BENCH[side]):
        if isinstance(one := content.get(name), dict):
            return one.get(FINGERPRINT)
    found = content.get(FINGERPRINT)
    return found.get(side) if isinstance(found, dict) else found


def _name_of_other(content: Values) -> Any:
    """Name of the model beside the one that a result file is about; None if there is none."""
    other = content.get("against", content.get("dense"))
    return other.get("name") if isinstance(other, dict) else other


def _object(path: Path) -> Values:
    try:
        return read_json(path)
    except DamagedError as error:
        raise UserError(f"{str(error).rstrip('.')}. {_REMEDY}") from error


def _steps(stage: Path) -> list[Values]:
    path = stage / "metrics.jsonl"
    lines = path.read_bytes().splitlines() if path.is_file() else []
    try:
        return [{"step": None, **json.loads(line)} for line in lines]
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{path} is truncated or altered. Delete {stage} and repeat the command of the run, "
            "which makes it again."
        ) from error
