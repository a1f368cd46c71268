"""A folder that appears whole or not at all."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dotmoe.errors import UserError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a write that found no room: disk, quota, or file size limit."""


@contextmanager
def staging(out: Path) -> Iterator[Path]:
    """A sibling `.OUT.partial` to write into; it becomes `out` when the block ends without error.

    Everything is on disk before the name changes, so `out` is never half-written, even after a
    power cut. On any exception the partial folder is removed.

    Raises:
        UserError: `out` exists already and is not an empty folder, or the disk is full.
    """
    out = out.absolute()
    require_new(out)
    partial = out.with_name(f".{out.name}.partial")
    if partial.exists():  # left by a process that was killed
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    finished = False
    try:
        yield partial
        sync_tree(partial)
        if out.exists():
            out.rmdir()
        partial.rename(out)
        finished = True
        _sync(out.parent)
    except OSError as error:
        if error.errno in DISK_FULL:
            raise full_disk(out.parent, error) from error
        raise
    finally:
        if not finished:
            shutil.rmtree(partial, ignore_errors=True)


def require_new(out: Path) -> None:
    """Refuse a folder that exists and is not empty."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} exists already. Remove it, or export to another folder.")


def full_disk(folder: Path, error: OSError, needed_bytes: int | None = None) -> UserError:
    """The error that tells a user about a write that found no room."""
    need = "" if needed_bytes is None else f"{needed_bytes:,} bytes are needed and "
    free = shutil.disk_usage(folder).free
    return UserError(
        f"Writing to {folder} failed ({error.strerror}): {need}{free:,} bytes are free. "
        "Make room, or export to another disk."
    )


def require_free(folder: Path, needed_bytes: int) -> None:
    """Refuse to start what cannot fit.

    Raises:
        UserError: Less than `needed_bytes` are free where `folder` lies.
    """
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise UserError(
            f"The export needs {needed_bytes:,} bytes, but {free:,} are free in {folder}. "
            "Make room, or export to another disk."
        )


def sync_tree(folder: Path) -> None:
    """Force every file of a folder, and the folders themselves, to disk."""
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
