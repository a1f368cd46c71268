"""Checkpoints on disk: whole or not there, verified before they are read, the newest kept.

Every rank must see the same folder. One checkpoint is a folder `step_00000100` with the files of
`torch.distributed.checkpoint`, `values.json`, and `manifest.json` with the size and SHA-256 of the
others, which is written last.
"""

import errno
import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dotmoe.distributed import broadcast_from_rank_zero, is_rank_zero, num_ranks
from dotmoe.errors import UserError, one_line
from dotmoe.files import checksums, damage_in, read_json, sync, write_json

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
        partial = self.folder / f".step_{step:08d}.partial"
        broadcast_from_rank_zero(lambda: self._make_room(partial))
        try:
            with _original_errors():
                save(dict(tensors), storage_writer=FileSystemWriter(partial))
            broadcast_from_rank_zero(lambda: self._complete(partial, step, values))
        except BaseException:
            if is_rank_zero():
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def load(self, tensors: dict[str, Tensor]) -> dict[str, Any] | None:
        """Fill tensors in place from the newest whole checkpoint; all ranks, in any number.

        Args:
            tensors: Names and shapes as saved; plain or DTensors of any placement.

        Returns:
            The plain values; None where there has never been a checkpoint.

        Raises:
            UserError: All checkpoints are damaged, or they hold other tensors.
        """
        newest = self.newest()
        if newest is None:
            return None
        try:
            with _original_errors(), torch.no_grad():
                load(dict(tensors), storage_reader=FileSystemReader(newest))
        except (RuntimeError, ValueError, KeyError) as error:
            raise UserError(
                f"{newest} does not fit: {one_line(error)}. Delete {self.folder} to start the "
                "stage again."
            ) from error
        return read_json(newest / _VALUES)

    def newest(self) -> Path | None:
        """The newest that is whole; None where there has never been one. The same on all ranks.

        Raises:
            UserError: There are checkpoints, and all are damaged.
        """
        return broadcast_from_rank_zero(self._newest)

    def last(self) -> Path | None:
        """The newest in name, unchecked."""
        return max(self.folder.glob("step_*"), default=None)

    def remove(self) -> None:
        """Remove all of them, when their stage's result has been saved."""
        if is_rank_zero():
            shutil.rmtree(self.folder, ignore_errors=True)

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


def _damage(checkpoint: Path) -> str | None:
    manifest = checkpoint / _MANIFEST
    if not manifest.is_file():
        return f"{manifest} is missing"
    try:
        files = read_json(manifest)["files"]
    except (UserError, KeyError):
        return f"{manifest} is truncated or has been altered"
    return damage_in(checkpoint, files)


@contextmanager
def _original_errors() -> Iterator[None]:
    """Raise the error of the first rank that has one, unwrapped, and expect a lone process."""
    wrapped: CheckpointException | None = None
    with warnings.catch_warnings():
        if num_ranks() == 1:
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            wrapped = error
    if wrapped is not None:
        cause, _ = next(iter(wrapped.failures.values()))
        if isinstance(cause, RuntimeError) and "inline_container" in str(cause):
            raise _system_error(cause)
        raise cause


def _system_error(short_write: BaseException) -> OSError:
    """What the system said where torch's file writer complains of a short write.

    An error that has travelled between ranks has lost it: a full disk is by far the likeliest.
    """
    cause: BaseException | None = short_write
    while cause is not None:
        if isinstance(cause, OSError):
            return cause
        cause = cause.__context__
    return OSError(errno.ENOSPC, "a file of the checkpoint was cut short")
