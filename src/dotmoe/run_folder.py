"""Where a run lives: a subfolder a stage, a finish marker each, the config and the provenance."""

import errno
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from dotmoe.config import RunConfig, as_json, from_json
from dotmoe.errors import UserError

if sys.platform != "win32":
    import fcntl

logger = logging.getLogger(__name__)

STAGES = {
    "data": "0_data",
    "calibrate": "1_calibrate",
    "align": "2_align",
    "extract": "3_extract",
    "export": "5_export",
    "evaluate": "6_evaluate",
    "report": "7_report",
}
_FINISHED = "finished"
_LOCK = ".lock"
_PACKAGES = ("dotmoe", "torch", "transformers", "safetensors", "datasets")


class RunFolder:
    """A run on disk. Opening it again with the same config goes on where it stopped."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def open(cls, config: RunConfig) -> "RunFolder":
        """Make the folder, or take up an unfinished run of the same config.

        Raises:
            UserError: Something else is in the way, or the folder cannot be made.
        """
        cls.require_usable(config)
        path = Path(config.out)
        try:
            path.mkdir(parents=True, exist_ok=True)
            write_text(path / "config.json", as_json(config))
        except (PermissionError, FileNotFoundError, NotADirectoryError) as error:
            _remove_if_empty(path)
            raise UserError(
                f"{path} cannot be made ({error.strerror}: {error.filename}). Choose another "
                "folder, or get permission."
            ) from error
        except BaseException:
            _remove_if_empty(path)
            raise
        return cls(path)

    @staticmethod
    def require_usable(config: RunConfig) -> None:
        """Refuse a folder that `open` would refuse; touches nothing.

        Raises:
            UserError: Something else is in the way.
        """
        path = Path(config.out)
        stored = path / "config.json"
        if stored.exists():
            if _identity(from_json(stored)) != _identity(config):
                raise UserError(
                    f"{path} holds a run with another config. Choose another folder, repeat that "
                    f"run with --config {stored}, or delete the folder."
                )
        elif path.exists() and (not path.is_dir() or _holds_more_than_a_start(path)):
            raise UserError(
                f"{path} is in the way: it exists and is no dotmoe run. Choose another folder."
            )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes out of the folder; the system takes the lock back after any end.

        Raises:
            UserError: Another process is at work in the folder.
        """
        if sys.platform == "win32":  # has no fcntl: runs are not kept apart
            yield
            return
        with (self.path / _LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(
                    f"{self.path} is being worked on by another dotmoe process. Wait for it, or "
                    "choose another folder."
                ) from error
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                logger.warning("%s cannot be locked: start no second run in it", self.path)
            yield

    def require_model(self, fingerprint: str) -> None:
        """Refuse to go on with another model than the run was started with.

        Raises:
            UserError: The model under that name has changed since.
        """
        stored = self.path / "model.sha256"
        if stored.exists() and stored.read_text(encoding="utf-8").strip() != fingerprint:
            raise UserError(
                f"{self.path} was started with another model of that name: its files have changed "
                "since. Restore them, or choose another folder."
            )
        write_text(stored, fingerprint + "\n")

    def stage(self, name: str) -> Path:
        """Folder of a stage, made if need be."""
        folder = self.path / STAGES[name]
        folder.mkdir(exist_ok=True)
        return folder

    def is_finished(self, name: str) -> bool:
        """Whether a stage ran to its end; anything else in its folder is not to be read."""
        return (self._marks / name).exists()

    @contextmanager
    def finishing(self, name: str) -> Iterator[Path]:
        """Run a stage: gives its folder; marks it finished if the block ends without error."""
        self.unfinish(name)
        yield self.stage(name)
        self._marks.mkdir(exist_ok=True)
        write_text(self._marks / name, time.strftime("%Y-%m-%dT%H:%M:%SZ\n", time.gmtime()))

    def clear(self, name: str) -> None:
        """Remove what an unfinished stage left behind."""
        shutil.rmtree(self.path / STAGES[name], ignore_errors=True)

    def discard_if_unstarted(self) -> None:
        """Remove the folder of a run that finished no stage: bad input leaves nothing behind."""
        if not any(self.is_finished(name) for name in STAGES):
            shutil.rmtree(self.path, ignore_errors=True)

    def unfinish(self, name: str) -> None:
        """Take back a finish marker, so that the stage runs again."""
        (self._marks / name).unlink(missing_ok=True)

    @property
    def _marks(self) -> Path:
        return self.path / _FINISHED


def _holds_more_than_a_start(path: Path) -> bool:
    """Whether there is anything that a process killed while opening the folder would not leave."""
    return any(item.name not in (_LOCK, ".config.json.partial") for item in path.iterdir())


def _remove_if_empty(path: Path) -> None:
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()


def export_folder(path: Path) -> Path:
    """The model folder meant by a path: the export of a run folder, or the path itself."""
    export = path / STAGES["export"]
    return export if (export / "config.json").exists() else path


def write_text(path: Path, text: str) -> None:
    """Write a whole file or nothing: temporary name, sync, rename."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read JSON written by `write_json`."""
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def provenance(seed: int) -> dict[str, Any]:
    """What a result must say of itself: versions, commit, machine, seed, time."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
        "versions": {"python": platform.python_version()} | {n: _version(n) for n in _PACKAGES},
        "hardware": _hardware(),
        "threads": torch.get_num_threads(),
        "seed": seed,
    }


def _identity(config: RunConfig) -> RunConfig:
    """The config without what only says how, not what: device, and the folder's own name."""
    return replace(config, out="", load=replace(config.load, device="auto"))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str | None:
    """Commit of our source tree, with `+changes` where it is not clean; None outside git."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        command = [
            "git",
            "-C",
            str(root),
            "describe",
            "--always",
            "--dirty=+changes",
            "--abbrev=12",
        ]
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def _hardware() -> str:
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"CPU, {os.cpu_count()} cores, {platform.machine()}"
