"""The folder of a run: a subfolder for each stage, and `manifest.json`, which records progress.

Resume, and every command that reads a run, trust the manifest alone. It contains command, config,
fingerprints of the inputs, and for each finished stage the size and SHA-256 of its files. Writes
of it are atomic, so the stages that it records are always the first ones, in order.
`config.json` is a plain copy of the config, for `--config`.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from dotmoe.common.distributed import (
    broadcast_from_rank_zero,
    is_rank_zero,
    raise_on_all_ranks,
)
from dotmoe.common.errors import UserError
from dotmoe.common.files import (
    LOCK,
    DamagedError,
    Values,
    checksums,
    damage_in,
    locked,
    make_folder,
    read_json,
    remove,
    require_place_for_weights,
    sync,
    write_json,
)
from dotmoe.common.options import COMMAND, differences, from_values, values_of, what_is_made
from dotmoe.common.stopwatch import Stopwatch
from dotmoe.models.source import EMBEDDED, at_revision
from dotmoe.run.provenance import provenance
from dotmoe.text.sources import is_text

STAGES = {
    "answers": "0_answers",
    "data": "0_data",
    "share": "1_share",
    "dense_layers": "1_dense_layers",
    "calibrate": "1_calibrate",
    "align": "2_align",
    "extract": "3_extract",
    "repair": "4_repair",
    "finetune": "4_finetune",
    "prune": "4_prune",
    "export": "5_export",
    "evaluate": "6_evaluate",
    "report": "7_report",
}
"""Folder of each stage, in the order in which stages run."""

RESULTS = "results.json"
"""The file that the evaluate stage writes; others in its folder come from other commands."""

INPUTS = "inputs"
"""Folder with the models and texts that Python code gave in memory; `convert` can fill it first."""

_CHANGED = {
    "model": "with another model of that name: its files have changed since. Restore them",
    "text": "with other text of that name: its files have changed since. Restore them",
    "experts": "from another run: the experts are not the same. Name that run",
}
"""What is said of an input of a run that is not the recorded one, by its name in the manifest."""

_MANIFEST, _CONFIG, _CHECKPOINTS = "manifest.json", "config.json", "checkpoints"
STOPPED = "stopped"
"""Key of the manifest with the time of attempts at a stage that were stopped, by stage."""
_SHOWN = 5
"""Options of another run that are named; the others are counted."""
_WRITTEN_BY_OTHERS = ("evaluate", "report")
"""Stages whose folders other commands write to, under locks of their own."""
_PROGRESS = ("metrics.jsonl", _CHECKPOINTS)
"""Names that an unfinished stage resumes from, together with `*.parts`."""

Config = TypeVar("Config")
Result = TypeVar("Result")


class FolderGoneError(UserError):
    """A run's folder was deleted or replaced while a process worked in it."""


class OtherRunError(UserError):
    """A folder holds a run with other options than those that are asked for."""


class RunFolder:
    """A run on disk: its manifest, its lock and the folders of its stages."""

    def __init__(self, path: Path, log: Callable[[str], None] = lambda text: None) -> None:
        self.path = path
        self._log = log
        self._manifest: dict[str, Any] | None = None
        self._lock_number: int | None = None
        """Number of the lock's file while it is held: a new folder of this name has another."""

    @property
    def exists(self) -> bool:
        """Whether a run was started here."""
        return (self.path / _MANIFEST).exists()

    @property
    def model(self) -> str:
        """The dense model that the run started with; of a hub model, `org/name@commit`."""
        return at_revision(self.manifest["model"], self.manifest.get("revision"))

    @property
    def model_to_read(self) -> str:
        """As `model`. Raises a `UserError` for a local one that is not where the run found it."""
        name = self.manifest["model"]
        is_of_the_hub = self.manifest.get("revision") is not None
        if is_of_the_hub or name == EMBEDDED or os.path.exists(os.path.expanduser(name)):
            return self.model
        from_here = "" if os.path.isabs(name) else f" from {Path.cwd()}"
        raise UserError(
            f"{self.path} was made from the model {name}, which is not there{from_here}. Put it "
            "there, or work in the folder in which the run was made."
        )

    @property
    def manifest(self) -> dict[str, Any]:
        """The contents: `command`, `model` (as the user named it), its `revision` (commit on the
        hub, or null), `config`, `inputs` (fingerprints), `stages`.
        """
        if self._manifest is None:
            path = self.path / _MANIFEST
            remedy = "Restore it, or choose another folder."
            try:
                manifest = read_json(path)
            except DamagedError as error:
                raise UserError(f"{error}. {remedy}") from error
            if "stages" not in manifest:
                raise UserError(f"{path} is not the manifest of a dotmoe run. {remedy}")
            self._manifest = self._with_inputs_here(manifest)
        return self._manifest

    def _with_inputs_here(self, values: Any) -> Any:
        """Values with paths of inputs in this folder, where it is now if it was moved or copied."""
        if isinstance(values, dict):
            return {name: self._with_inputs_here(each) for name, each in values.items()}
        if isinstance(values, list):
            return [self._with_inputs_here(each) for each in values]
        if not isinstance(values, str) or Path(values).parent.name != INPUTS:
            return values
        here = self.path.absolute() / INPUTS / Path(values).name
        return str(here) if here.exists() else values  # its name has a hash of what it holds

    def config(self, cls: type[Config]) -> Config:
        """The config of the run; refused if another command made the run."""
        return from_values(cls, self.manifest["config"], str(self.path / _MANIFEST))

    def path_of(self, name: str) -> Path:
        """Folder of a stage; it need not exist."""
        return self.path / STAGES[name]

    def has(self, *names: str) -> bool:
        """Whether these stages are finished and their results still exist."""
        return self.exists and all(map(self._is_there, names))

    def _is_there(self, name: str) -> bool:
        """Whether a stage is finished and what it left still exists; some leave nothing."""
        stage = self.manifest["stages"].get(name)
        if stage is None:
            return False
        left_nothing = name != "export" and not stage["files"]
        return left_nothing or _is_filled(self._result_of(name))

    def verified(self, name: str, *only: str) -> Path:
        """Folder of a finished stage; a `UserError` if its files, or `only` these, are damaged.

        An export has checksums of its own, see `dotmoe.export.record.require_checksums`.
        """
        folder = self.path_of(name)
        recorded = self.manifest["stages"][name]["files"]
        damage = damage_in(folder, {file: recorded[file] for file in only or recorded})
        if damage is not None:
            command = f"dotmoe {self.manifest[COMMAND]}"
            if self.manifest[COMMAND] == "compare":  # Python's prune leaves such a run, too
                command = "compare or prune"
            raise UserError(
                f"{damage}. Delete {self.to_delete(name)} and repeat the {command} that made it."
            )
        return folder

    def to_delete(self, name: str) -> str:
        """What to delete so that the command of the run makes a stage again.

        A run with an export and its results is finished, whatever else of it is gone.
        """
        places = [self._result_of(name)]
        places += [self.path_of(last) for last in ("export", "prune") if self.has(last)]
        if name == "evaluate":  # it comes after them
            places = places[:1]
        return " and ".join(dict.fromkeys(map(str, places)))

    def fingerprint_of(self, name: str) -> str:
        """SHA-256 that identifies all tensors that a finished stage has written."""
        files = self.manifest["stages"][name]["files"]
        tensors = [file for file in sorted(files) if file.endswith(".safetensors")]
        lines = [f"{files[file]['sha256']}  {file}\n" for file in tensors]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def seconds(self, *names: str) -> float | None:
        """Total seconds of the finished stages, stopped attempts included; None if none is."""
        stages = self.manifest["stages"]
        times: list[float] = [stages[name]["seconds"] for name in names if name in stages]
        return sum(times) if times else None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A lock against other processes; the system releases it however this process ends."""
        refusal = (
            f"{self.path} is in use by another dotmoe process. Wait for it, or choose another "
            "folder."
        )
        with locked(self.path / LOCK, refusal) as is_held:
            if is_held:
                self._lock_number = _number_of(self.path / LOCK)
            try:
                yield
            finally:
                self._lock_number = None

    def _require_same_folder(self) -> None:
        """Refuse to write to a folder that was deleted, or made anew, since it was locked."""
        if self._lock_number is not None and self._lock_number != _number_of(self.path / LOCK):
            raise FolderGoneError(
                f"{self.path} was deleted or replaced while this command worked in it. Give the "
                "command again, or choose another folder."
            )

    @contextmanager
    def at_work(self, config: Any) -> Iterator[None]:
        """Within this context, the folder is locked; after an error a new, empty run is removed."""
        self._require_usable(config)
        make_folder(self.path)
        with self.alone():
            self._manifest = None  # another process may have changed it
            self._require_usable(config)
            self._remove_partial_files()
            is_new = not self.exists
            try:
                yield
            except FolderGoneError:
                raise
            except BaseException:
                if is_new:
                    self._remove_unless_progress()
                raise

    def _remove_partial_files(self) -> None:
        """Remove what processes that were killed had begun to write, where others do not write."""
        folders = [self.path_of(name) for name in STAGES if name not in _WRITTEN_BY_OTHERS]
        for folder in (self.path, *folders, *self.path.glob("*/*.parts")):
            for partial in folder.glob(".*.partial"):
                if partial.is_file():
                    remove(partial)

    def begin(
        self,
        config: Any,
        model: str,
        revision: str | None,
        inputs: Mapping[str, str],
    ) -> None:
        """Record the config and inputs of the run, or refuse inputs other than the recorded ones.

        `model` is the user's name for the dense model, `revision` its commit on the hub; `inputs`
        are fingerprints by name: of the `model`, of each `text 1`, `text 2`, of the `experts` to
        finetune. One that is left out, such as of text that is gone, stays as it is recorded.
        """
        stages, stopped = {}, {}
        if self.exists:
            self.require_inputs(inputs)
            stopped = self.manifest.get(STOPPED, {})
            stages = self.manifest["stages"]
            if "data" in stages:
                inputs = self._with_recorded_texts(inputs)
            elif self._texts_have_changed(inputs):
                stages = {name: made for name, made in stages.items() if name != "answers"}
            inputs = {**self.manifest["inputs"], **inputs}
        values = values_of(config)
        about = {"format": 1, COMMAND: config.command, "model": model}
        about["revision"] = revision
        done = {"stages": stages, STOPPED: stopped}
        self._write({**about, "config": values, "inputs": dict(inputs), **done})
        write_json(self.path / _CONFIG, values)

    def _with_recorded_texts(self, inputs: Mapping[str, str]) -> dict[str, str]:
        """Inputs of a run that has its tokens, without texts that it did not record then."""
        recorded = self.manifest["inputs"]
        if any(is_text(name) and name not in inputs for name in recorded):
            self._log("text of the run is gone: the tokens that the run has of it are used")
        return {name: sha for name, sha in inputs.items() if not is_text(name) or name in recorded}

    def _texts_have_changed(self, inputs: Mapping[str, str]) -> bool:
        """Whether a run without tokens has other texts now; refused if one of them is gone."""
        recorded = self.manifest["inputs"]
        if any(is_text(name) and name not in inputs for name in recorded):
            raise UserError(
                f"text that {self.path} was started with is not there any more. Put it there "
                "again, or choose another folder."
            )
        return any(is_text(name) and sha != recorded.get(name) for name, sha in inputs.items())

    def require_inputs(self, inputs: Mapping[str, str]) -> None:
        """Refuse inputs other than those that the run was started with; see `begin`.

        Before the text is tokenised, it may be mended; `begin` then forgets answers to its old
        questions.
        """
        recorded = self.manifest["inputs"]
        for name, sha in inputs.items():
            if is_text(name) and "data" not in self.manifest["stages"]:
                continue
            if sha != recorded.get(name, sha):
                said = _CHANGED["text" if is_text(name) else name]
                raise UserError(f"{self.path} was started {said}, or choose another folder.")

    def run_stage(
        self,
        name: str,
        load: Callable[[Path], Result],
        make: Callable[[Path], Result],
        save: Callable[[Result, Path], None] = lambda result, folder: None,
    ) -> Result:
        """The result of a stage: loaded if the stage is finished, else made and recorded.

        A finished stage whose folder is gone is made again, and so is everything after it. All
        ranks call `make` together; the folder may hold checkpoints and partial files of a stopped
        process. Only rank zero calls `save`, which writes what `make` has not written itself.
        """
        folder = self.path_of(name)
        if broadcast_from_rank_zero(lambda: self._verify_or_prepare(name)):
            return raise_on_all_ranks(lambda: load(folder))
        stopwatch = Stopwatch()
        with self._counting_a_stop(name, stopwatch):
            result = make(folder)

        def record() -> None:
            save(result, folder)
            self._record(name, stopwatch.read())

        broadcast_from_rank_zero(record)
        return result

    @contextmanager
    def _counting_a_stop(self, name: str, stopwatch: Stopwatch) -> Iterator[None]:
        """Within this context, an interrupt or error adds the time of the stage to its `stopped`.

        A process that is killed outright adds nothing.
        """
        try:
            yield
        except BaseException as error:
            if is_rank_zero():
                if isinstance(error, OSError):  # such as a file that is not there any more
                    self._require_same_folder()
                with suppress(OSError, UserError):  # the disk may be full; the first error counts
                    self._write({**self.manifest, STOPPED: self._stopped_with(name, stopwatch)})
            raise

    def _stopped_with(self, name: str, stopwatch: Stopwatch) -> dict[str, Values]:
        """Time of stopped attempts by stage, with this attempt at one of them."""
        stopped = self.manifest.get(STOPPED, {})
        return {**stopped, name: _added(stopwatch.read(), stopped.get(name, {}))}

    def reopen(self, name: str) -> None:
        """Forget that a stage is finished: it is made again from the progress in its folder."""
        stages = {stage: made for stage, made in self.manifest["stages"].items() if stage != name}
        self._write({**self.manifest, "stages": stages})

    def _verify_or_prepare(self, name: str) -> bool:
        """Verify a finished stage and return True; else prepare its folder and return False.

        Preparing removes the results of all later stages.
        """
        if self.has(name):
            self.verified(name)
            return True
        folder = self.path_of(name)
        stages = self.manifest["stages"]
        later = list(STAGES)[list(STAGES).index(name) :]
        if name in stages:
            self._log(f"{folder} is gone: it is made again, and so are all later stages")
        kept = {stage: record for stage, record in stages.items() if stage not in later}
        self._write({**self.manifest, "stages": kept})
        if name != "evaluate":
            for path in folder.glob("*"):
                if not _is_progress(path):
                    remove(path)
        for stage in later[1:]:
            remove(self._result_of(stage))
        folder.mkdir(exist_ok=True)
        return False

    def _record(self, name: str, took: Mapping[str, float]) -> None:
        folder = self.path_of(name)
        files = [RESULTS] if name == "evaluate" else []
        if name not in ("export", "evaluate"):
            paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
            files = [path.as_posix() for path in paths if path.parts[0] != _CHECKPOINTS]
        for file in files:
            sync(folder / file)
        config = self.manifest["config"]
        stopped = dict(self.manifest.get(STOPPED, {}))
        record = {
            **_added(took, stopped.pop(name, {})),
            "provenance": provenance(config["seed"], config["load"]["device"]),
            "files": checksums(folder, files),
        }
        stages = {**self.manifest["stages"], name: record}
        self._write({**self.manifest, "stages": stages, STOPPED: stopped})
        shutil.rmtree(folder / _CHECKPOINTS, ignore_errors=True)

    def _require_usable(self, config: Any) -> None:
        if self.exists:
            if others := differences(what_is_made(self.config(type(config))), what_is_made(config)):
                named = ", ".join(others[:_SHOWN])
                if len(others) > _SHOWN:
                    named += f" and {len(others) - _SHOWN} more"
                raise OtherRunError(
                    f"{self.path} holds a run with other options: {named}. Choose another folder, "
                    f"go on with that run by --config {self.path / _CONFIG}, or delete the folder."
                )
            return
        self.require_place()

    def require_place(self) -> None:
        """Refuse a place for a new run that has other files, or that lies inside a model."""
        require_place_for_weights(self.path)
        if self.path.is_file() or not all(map(_is_left_at_a_start, self.path.glob("*"))):
            raise UserError(
                f"{self.path} is in the way: it exists and is no dotmoe run. Choose another folder."
            )

    def _result_of(self, name: str) -> Path:
        """Path of a stage's result: its folder, or for the evaluate stage one file in it."""
        return self.path_of(name) / RESULTS if name == "evaluate" else self.path_of(name)

    def _write(self, manifest: dict[str, Any]) -> None:
        self._require_same_folder()
        write_json(self.path / _MANIFEST, manifest)
        self._manifest = manifest

    def _remove_unless_progress(self) -> None:
        """Remove what this process made, unless a stage is finished or has progress to resume."""
        folders = [self.path_of(name) for name in STAGES]
        items = (item for folder in folders for item in folder.glob("*"))
        if (self.exists and self.manifest["stages"]) or any(map(_is_progress, items)):
            return
        for path in (*folders, *(self.path / name for name in (_MANIFEST, _CONFIG, LOCK))):
            remove(path)
        with suppress(OSError):
            self.path.rmdir()


def export_folder(path: Path) -> Path:
    """The model folder for a path: of a run folder its export or pruned model, else the path."""
    of_a_run = path / STAGES["export"], path / STAGES["prune"] / "model"
    return next((folder for folder in of_a_run if _is_filled(folder)), path)


def _added(took: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Times by name, each with the time that was taken before."""
    return {name: round(time + before.get(name, 0.0), 3) for name, time in took.items()}


def _is_filled(path: Path) -> bool:
    return path.is_file() or any(path.glob("*"))


def _number_of(file: Path) -> int | None:
    """The number that the file system gave a file; None if it is not there."""
    try:
        return file.stat().st_ino
    except OSError:
        return None


def _is_left_at_a_start(path: Path) -> bool:
    """Whether this is there before a run begins, or left by a process that was killed then."""
    is_partial = path.name.startswith(f".{_MANIFEST}.") and path.suffix == ".partial"
    return path.name in (LOCK, INPUTS) or is_partial


def _is_progress(path: Path) -> bool:
    """Whether a stage can resume from this file or folder."""
    return path.name in _PROGRESS or path.suffix == ".parts"
