"""Checkpoints on disk: whole or not there, checked before they are read, the newest kept.

Every rank must see the same folder. One checkpoint is a folder `step_00000100` with the files of
`torch.distributed.checkpoint`, `values.json`, and `manifest.json` with the size and SHA-256 of the
others, which is written last.
"""

import json
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from dotmoe.checksums import damage_in, manifest_of
from dotmoe.distributed import from_first, is_first
from dotmoe.errors import UserError
from dotmoe.training.tensor_files import write_tensors

logger = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_VALUES = "values.json"


class Checkpoints:
    """The checkpoints of one stage."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep
        """How many of the newest are kept; at least 1."""

    def save(self, step: int, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Write one checkpoint; all ranks together. Older ones go when it is whole on disk.

        Args:
            step: Its number.
            tensors: By name; plain ones are equal on all ranks, of a DTensor each rank writes its
                part.
            values: Plain values for JSON, equal on all ranks.

        Raises:
            OSError: The disk is full, or the like. Nothing of this checkpoint is left then, and the
                others are as they were.
        """
        partial = self.folder / f".{_name(step)}.partial"
        from_first(lambda: self._make_room(partial))
        try:
            write_tensors(tensors, partial)
            from_first(lambda: self._complete(partial, step, values))
        except BaseException:
            if is_first():
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def newest(self) -> Path | None:
        """The newest that is whole; None where there has never been one. The same on all ranks.

        Raises:
            UserError: There are checkpoints, and all are damaged.
        """
        return from_first(self._newest)

    def last(self) -> Path | None:
        """The newest in name, unchecked."""
        return max(self.folder.glob("step_*"), default=None)

    def remove(self) -> None:
        """Remove all of them, when their stage's result has been saved."""
        if is_first():
            shutil.rmtree(self.folder, ignore_errors=True)

    def _make_room(self, partial: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(".step_*"):
            shutil.rmtree(left)
        partial.mkdir()

    def _complete(self, partial: Path, step: int, values: dict[str, Any]) -> None:
        _write(partial / _VALUES, values)
        manifest = manifest_of(partial, [file.name for file in partial.iterdir()])
        _write(partial / _MANIFEST, {"files": manifest})
        _sync(partial)
        final = self.folder / _name(step)
        if final.exists():  # a damaged one, whose steps have been taken again
            final.rename(self.folder / f".{final.name}.damaged")
        partial.rename(final)
        _sync(self.folder)
        damage = _damage(final)
        if damage is not None:
            raise UserError(f"{damage}, right after it was written. Check the disk.")
        self._remove_others(final)

    def _remove_others(self, newest: Path) -> None:
        """All but the newest `keep`; what is numbered above the newest is damaged."""
        older = sorted(self.folder.glob("step_*"), reverse=True)
        kept = [path for path in older if path.name <= newest.name][: self.keep]
        for path in [*self.folder.glob(".step_*"), *older]:
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def _newest(self) -> Path | None:
        damages: list[str] = []
        for path in sorted(self.folder.glob("step_*"), reverse=True):
            damage = _damage(path)
            if damage is None:
                if damages:
                    logger.warning("%s. Going on from %s, the one before.", damages[-1], path)
                return path
            damages.append(damage)
        if damages:
            raise UserError(
                f"every checkpoint in {self.folder} is damaged ({damages[0]}). Restore one from a "
                "copy, or delete that folder to start the stage again."
            )
        return None


def values_of(checkpoint: Path) -> dict[str, Any]:
    """The plain values of a whole checkpoint."""
    values: dict[str, Any] = json.loads((checkpoint / _VALUES).read_text(encoding="utf-8"))
    return values


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _damage(checkpoint: Path) -> str | None:
    manifest = checkpoint / _MANIFEST
    if not manifest.is_file():
        return f"{manifest} is missing"
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        return f"{manifest} is truncated or has been altered"
    return damage_in(checkpoint, files)


def _write(path: Path, value: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Make the names in a folder last through a power cut."""
    if sys.platform == "win32":  # cannot open folders
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
