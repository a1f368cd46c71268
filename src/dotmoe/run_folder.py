"""Where a run lives: a folder for each stage, and `manifest.json`, which says what is finished.

The manifest is the authority for resume and for every command that reads a run: command, config,
fingerprints of what the run is made of, and of each finished stage the size and SHA-256 of its
files. It is replaced in one step, so its records are always those of the first stages, in order.
`config.json` is a plain copy of the config, for `--config`.
"""

import errno
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from dotmoe.distributed import broadcast_from_rank_zero, raise_on_all_ranks
from dotmoe.errors import UserError
from dotmoe.files import (
    DamagedError,
    checksums,
    damage_in,
    read_with_checksum,
    sync,
    with_checksum,
    write_json,
    write_text,
)
from dotmoe.options import COMMAND, from_values, identity, values_of
from dotmoe.provenance import provenance

logger = logging.getLogger(__name__)

STAGES = {
    "data": "0_data",
    "calibrate": "1_calibrate",
    "align": "2_align",
    "extract": "3_extract",
    "finetune": "4_finetune",
    "export": "5_export",
    "evaluate": "6_evaluate",
    "report": "7_report",
}
"""Folders of the stages, in their order."""

RESULTS = "results.json"
"""The file of the evaluate stage; what else lies in its folder is of other commands."""

_MANIFEST, _CONFIG, _LOCK = "manifest.json", "config.json", ".lock"
_CHECKPOINTS = "checkpoints"
_LOGS = ("tensorboard", "wandb")

Config = TypeVar("Config")
Result = TypeVar("Result")


class RunFolder:
    """A run on disk. The same command goes on where it stopped."""

    def __init__(self, path: Path, log: Callable[[str], None] = lambda text: None) -> None:
        self.path = path
        self._log = log
        self._manifest: dict[str, Any] | None = None
        self._verified: set[str] = set()
        self._made: list[Path] = []

    # --- reading ------------------------------------------------------------------------------

    @property
    def exists(self) -> bool:
        """Whether a run was started here."""
        return (self.path / _MANIFEST).exists()

    @property
    def manifest(self) -> dict[str, Any]:
        """`command`, `model` (its name), `config`, `inputs` (fingerprints) and `stages`.

        Raises:
            UserError: There is none, or it is damaged.
        """
        if self._manifest is None:
            try:
                self._manifest = read_with_checksum(self.path / _MANIFEST)
            except DamagedError as error:
                raise UserError(
                    f"{error}. It says what the run in {self.path} is: restore it, or choose "
                    "another folder."
                ) from error
        return self._manifest

    def config(self, cls: type[Config]) -> Config:
        """The config of the run.

        Raises:
            UserError: It is of another command.
        """
        return from_values(cls, self.manifest["config"], str(self.path / _MANIFEST))

    def stage(self, name: str) -> Path:
        """Folder of a stage; it need not exist."""
        return self.path / STAGES[name]

    def holds(self, *names: str) -> bool:
        """Whether these stages are finished, and their folders are still there."""
        return self.exists and all(
            name in self.manifest["stages"] and _is_filled(self._result_of(name)) for name in names
        )

    def verified(self, name: str, *only: str) -> Path:
        """Folder of a finished stage after comparing its files with their checksums, once.

        An export has checksums of its own, see `dotmoe.export.require_intact`.

        Args:
            name: The stage.
            only: Files that are read now, by their names in the folder. Default: all.

        Raises:
            UserError: A file is missing, truncated or altered since the stage ended.
        """
        if name not in self._verified:
            recorded = self.manifest["stages"][name]["files"]
            wanted = {file: recorded[file] for file in only} if only else recorded
            damage = damage_in(self.stage(name), wanted)
            if damage is not None:
                raise UserError(
                    f"{damage}. Delete {self._result_of(name)} and repeat the dotmoe "
                    f"{self.manifest[COMMAND]} that made it."
                )
            if not only:
                self._verified.add(name)
        return self.stage(name)

    def seconds(self, *names: str) -> float | None:
        """Time that finished stages took, without what an interrupted process had done before."""
        stages = self.manifest["stages"]
        times: list[float] = [stages[name]["seconds"] for name in names if name in stages]
        return sum(times) if times else None

    # --- starting -----------------------------------------------------------------------------

    def require_usable(self, config: Any) -> None:
        """Refuse a folder that this config cannot be run in; touches nothing.

        Raises:
            UserError: It holds something else, or a run with another config.
        """
        if self.exists:
            command = self.manifest[COMMAND]
            if command != config.command:
                raise UserError(
                    f"{self.path} holds a run of dotmoe {command}, not of dotmoe {config.command}. "
                    "Choose another folder."
                )
            if identity(self.config(type(config))) != identity(config):
                raise UserError(
                    f"{self.path} holds a run with another config. Choose another folder, repeat "
                    f"that run with --config {self.path / _CONFIG}, or delete the folder."
                )
        elif self.path.exists() and (not self.path.is_dir() or self._holds_more_than_a_start()):
            raise UserError(
                f"{self.path} is in the way: it exists and is no dotmoe run. Choose another folder."
            )

    def alone(self) -> AbstractContextManager[None]:
        """Keep other processes out of the folder; the system takes the lock back after any end.

        Raises:
            UserError: Another process is at work in it.
        """
        return _locked(self.path)

    @contextmanager
    def at_work(self, config: Any) -> Iterator[None]:
        """Make the folder and keep other processes out; leave nothing if nothing was finished.

        Raises:
            UserError: As `require_usable`, the folder cannot be made, or another process works in
                it.
        """
        self.require_usable(config)
        with ExitStack() as held:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                held.enter_context(self.alone())
            except (PermissionError, FileNotFoundError, NotADirectoryError) as error:
                with suppress(OSError):
                    self.path.rmdir()
                raise UserError(
                    f"{self.path} cannot be made ({error.strerror}: {error.filename}). Choose "
                    "another folder, or get permission."
                ) from error
            self._manifest = None  # another process may have changed it
            self.require_usable(config)
            is_new = not self.exists
            try:
                yield
            except BaseException:
                if is_new and not self._has_progress():
                    self._remove()
                raise

    def begin(self, config: Any, model: str, inputs: Mapping[str, str]) -> None:
        """Record what the run is made of, or refuse to go on with anything else.

        Args:
            config: Of the run.
            model: What the user calls the dense model.
            inputs: Fingerprints: of the dense `model`, and of the `layout` that is finetuned.

        Raises:
            UserError: An input is not what the run was started with.
        """
        stages: dict[str, Any] = {}
        if self.exists:
            self.require_inputs(inputs)
            stages = self.manifest["stages"]
        values = values_of(config)
        manifest = {
            "format": 1,
            COMMAND: config.command,
            "model": model,
            "config": values,
            "inputs": dict(inputs),
            "stages": stages,
        }
        if not self.exists or manifest != self.manifest:
            self._write(manifest)
        write_json(self.path / _CONFIG, values)

    def require_inputs(self, inputs: Mapping[str, str]) -> None:
        """Refuse to go on with another model or layout than the run was started with.

        Raises:
            UserError: An input has another fingerprint.
        """
        known = self.manifest["inputs"]
        if known["model"] != inputs["model"]:
            raise UserError(
                f"{self.path} was started with another model of that name: its files have changed "
                "since. Restore them, or choose another folder."
            )
        if known.get("layout") != inputs.get("layout"):
            raise UserError(
                f"{self.path} was started from another run: the experts are not the same. Name "
                "that run, or choose another folder."
            )

    # --- stages -------------------------------------------------------------------------------

    def run_stage(
        self,
        name: str,
        load: Callable[[Path], Result],
        make: Callable[[Path], Result],
        *,
        alone: bool = False,
    ) -> Result:
        """The result of a stage: loaded if the stage is finished, else made and recorded.

        A finished stage whose folder is gone is made again, and so is everything after it.

        Args:
            name: The stage.
            load: Reads the result from the stage's folder.
            make: Writes the result into the folder and returns it. The folder may hold checkpoints
                and parts of a process that was stopped. All ranks call it together.
            alone: Whether rank zero alone makes the result, and the others load it.

        Raises:
            UserError: A file of the finished stage is damaged.
        """
        folder, made = self.stage(name), list[Result]()
        if not broadcast_from_rank_zero(lambda: self._is_ready(name)):
            started = time.monotonic()
            if alone:
                broadcast_from_rank_zero(lambda: made.append(make(folder)))
            else:
                made.append(make(folder))
            broadcast_from_rank_zero(lambda: self._record(name, time.monotonic() - started))
        return raise_on_all_ranks(lambda: made[0] if made else load(folder))

    def _is_ready(self, name: str) -> bool:
        """Whether a stage is finished; if not, its folder is prepared, and what came after goes."""
        if self.holds(name):
            self.verified(name)
            return True
        names = list(STAGES)
        later = names[names.index(name) :]
        stages = self.manifest["stages"]
        if any(stage in stages for stage in later):
            if name in stages:
                self._log(f"{self.stage(name)} is gone: it is made again, and all that follows it")
            kept = {stage: record for stage, record in stages.items() if stage not in later}
            self._write({**self.manifest, "stages": kept})
        for stage in later:
            self._clear(stage, but_progress=stage == name)
        folder = self.stage(name)
        folder.mkdir(exist_ok=True)
        self._made.append(folder)
        return False

    def _record(self, name: str, seconds: float) -> None:
        folder = self.stage(name)
        if name == "export":
            files = []
        elif name == "evaluate":
            files = [RESULTS]
        else:
            paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
            skipped = (_CHECKPOINTS, *_LOGS)
            files = [path.as_posix() for path in paths if path.parts[0] not in skipped]
        for file in files:
            sync(folder / file)
        record = {
            "seconds": round(seconds, 3),
            "provenance": provenance(self.manifest["config"].get("seed", 0)),
            "files": checksums(folder, files),
        }
        self._write({**self.manifest, "stages": {**self.manifest["stages"], name: record}})
        self._verified.add(name)
        shutil.rmtree(folder / _CHECKPOINTS, ignore_errors=True)

    def _clear(self, name: str, *, but_progress: bool) -> None:
        """Remove what an unfinished stage left, but for that from which it can go on."""
        folder = self.stage(name)
        if name == "evaluate":
            (folder / RESULTS).unlink(missing_ok=True)
        elif not but_progress:
            shutil.rmtree(folder, ignore_errors=True)
        elif folder.is_dir():
            for path in folder.iterdir():
                if path.is_dir():
                    if not _is_progress(path):
                        shutil.rmtree(path)
                elif path.name != "metrics.jsonl":
                    path.unlink()

    # --- the rest -----------------------------------------------------------------------------

    def _result_of(self, name: str) -> Path:
        """What a stage leaves: its folder, or of the evaluate stage the one file in it."""
        return self.stage(name) / RESULTS if name == "evaluate" else self.stage(name)

    def _write(self, manifest: dict[str, Any]) -> None:
        write_text(self.path / _MANIFEST, with_checksum(manifest))
        self._manifest = manifest

    def _has_progress(self) -> bool:
        """Whether a stage is finished, or has left something to go on from."""
        if self.exists and self.manifest["stages"]:
            return True
        folders = (self.stage(name) for name in STAGES)
        return any(_is_progress(item) for folder in folders for item in folder.glob("*"))

    def _remove(self) -> None:
        """Remove what this process made; the folder goes if nothing else is in it."""
        for folder in self._made:
            shutil.rmtree(folder, ignore_errors=True)
        for name in (_MANIFEST, _CONFIG, _LOCK):
            (self.path / name).unlink(missing_ok=True)
        with suppress(OSError):
            self.path.rmdir()

    def _holds_more_than_a_start(self) -> bool:
        """Whether there is anything that a process killed at its start would not leave."""
        left = {_LOCK, f".{_MANIFEST}.partial"}
        return any(item.name not in left for item in self.path.iterdir())


def export_folder(path: Path) -> Path:
    """The model folder meant by a path: the export of a run folder, or the path itself."""
    export = path / STAGES["export"]
    return export if any(export.glob("*")) else path


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    lock = FileLock(folder / _LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise UserError(
            f"{folder} is being worked on by another dotmoe process. Wait for it, or choose "
            "another folder."
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP):
            raise
        logger.warning("%s cannot be locked: start no second run in it", folder)
    try:
        yield
    finally:
        lock.release()


def _is_filled(path: Path) -> bool:
    return path.is_file() or any(path.glob("*"))


def _is_progress(path: Path) -> bool:
    """Whether a folder in that of a stage is one from which the stage can go on."""
    return path.is_dir() and (path.name in (_CHECKPOINTS, *_LOGS) or path.suffix == ".parts")
