"""Checkpoints on disk: whole or not there, verified before they are read, the newest kept.

Every rank must see the same folder. One checkpoint is a folder `step_00000100` with the files of
`torch.distributed.checkpoint`, `values.json`, and `manifest.json` with the size and SHA-256 of the
others, which is written last.
"""

import errno
import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dotmoe.distributed import broadcast_from_rank_zero, is_rank_zero
from dotmoe.errors import UserError, one_line
from dotmoe.files import checksums, damage_in, read_json, sync, write_json

logger = logging.getLogger(__name__)
warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is no mistake

_MANIFEST, _VALUES = "manifest.json", "values.json"


class Checkpoints:
    """The checkpoints of one stage, of which the newest `keep` stay."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def save(self, step: int, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Write one checkpoint; all ranks together. Older ones go when it is whole on disk.

        Plain tensors and values, which are for JSON, are equal on all ranks; of a DTensor each rank
        writes its part. Where that fails, with an `OSError` if the disk is full, nothing of this
        checkpoint is left and the others are as they were.
        """
        partial = self.folder / f".step_{step:08d}.partial"
        broadcast_from_rank_zero(lambda: self._make_room(partial))
        try:
            save(dict(tensors), storage_writer=FileSystemWriter(partial))
            broadcast_from_rank_zero(lambda: self._complete(partial, step, values))
        except BaseException as error:
            if is_rank_zero():
                shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, CheckpointException):
                raise _cause_of(error) from error
            raise

    def load(self, tensors: dict[str, Tensor]) -> dict[str, Any] | None:
        """Fill tensors in place from the newest whole checkpoint, and return its plain values.

        All ranks, in any number; None where there has never been a checkpoint. A `UserError` says
        that all are damaged, or hold other tensors.
        """
        newest = self.newest()
        if newest is None:
            return None
        try:
            with torch.no_grad():
                load(dict(tensors), storage_reader=FileSystemReader(newest))
        except CheckpointException as error:
            raise UserError(
                f"{newest} does not fit: {one_line(_cause_of(error))}. Delete {self.folder} to "
                "start the stage again."
            ) from error
        return read_json(newest / _VALUES)

    def newest(self) -> Path | None:
        """The newest that is whole, the same on all ranks; see `load`."""
        return broadcast_from_rank_zero(self._newest)

    def last(self) -> Path | None:
        """The newest in name, unchecked."""
        return max(self.folder.glob("step_*"), default=None)

    def _make_room(self, partial: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(".step_*"):
            shutil.rmtree(left)
        partial.mkdir()

    def _complete(self, partial: Path, step: int, values: dict[str, Any]) -> None:
        write_json(partial / _VALUES, values)
        files = checksums(partial, [file.name for file in partial.iterdir()])
        write_json(partial / _MANIFEST, {"files": files})
        sync(partial)
        final = self.folder / f"step_{step:08d}"
        if final.exists():  # a damaged one, whose steps have been taken again
            final.rename(self.folder / f".{final.name}.damaged")
        partial.rename(final)
        sync(self.folder)
        every = sorted(self.folder.glob("*step_*"), reverse=True)
        kept = [path for path in every if "step_" <= path.name <= final.name][: self.keep]
        for path in every:  # what is numbered above the newest is damaged
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


def _damage(checkpoint: Path) -> str | None:
    manifest = checkpoint / _MANIFEST
    try:
        return damage_in(checkpoint, read_json(manifest)["files"])
    except (UserError, KeyError):
        return f"{manifest} is missing, truncated or altered"


def _cause_of(error: CheckpointException) -> BaseException:
    """The error of the first rank that has one."""
    cause, _ = next(iter(error.failures.values()))
    if "inline_container" in str(cause):  # torch's file writer, which keeps what the system said
        return OSError(errno.ENOSPC, "a file of the checkpoint was cut short")
    return cause
