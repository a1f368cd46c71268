"""Atomic writes of files and folders, checksums that detect damage, and locks."""

import errno
import hashlib
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dotmoe.common.errors import UserError, one_line

LOCK = ".lock"
"""File that a process locks in the folder that it writes."""

logger = logging.getLogger(__name__)

Values = dict[str, Any]
"""A JSON object."""
Checksum = dict[str, Any]
"""Record of one file: its size in `bytes` and its `sha256`."""


def is_finite(tensor: Any) -> bool:
    """Whether a tensor has neither NaN nor infinity."""
    # Minimum and maximum suffice, without memory of the tensor's size.
    return tensor.numel() == 0 or all(map(math.isfinite, tensor.aminmax()))


def require_finite(name: str, tensor: Any, path: Path) -> None:
    """Refuse to write a tensor with NaN or infinity to `path`."""
    if not is_finite(tensor):
        raise UserError(
            f"{name} would contain NaN or infinity as {tensor.dtype}, so it is not written to "
            f"{path}. Compute with --dtype float32, and report a bug if that does not help."
        )


def save_tensors(tensors: Mapping[str, Any], path: Path, **metadata: str) -> None:
    """Write a safetensors file, from any device; refuses tensors that are not finite."""
    from safetensors.torch import save_file  # imports torch

    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        require_finite(name, tensor, path)
    save_file(tensors, path, metadata=metadata or None)
    set_usual_mode(path)  # safetensors makes files that their owner alone can read


def expanded(name: str) -> Path:
    """The path that a user named; `~` and `~user` become homes, unless there is no such user.

    Methods of `Path` raise then. They also raise where a name is too long for a file: ask `os.path`
    whether the path exists.
    """
    return Path(os.path.expanduser(name))


class DamagedError(UserError):
    """A file is missing, truncated or altered; the message names it."""


def sync(path: Path) -> None:
    """Force the content of a file to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_names(folder: Path) -> None:
    """Force the names in a folder to disk where that can be done.

    Some file systems cannot, and a folder that cannot be listed cannot be opened.
    """
    try:
        sync(folder)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP):
            raise


def set_usual_mode(path: Path) -> None:
    """Give a file the permissions of one that `open` makes: all that the umask leaves."""
    umask = os.umask(0)  # there is no call that only reads it
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically, and its folder: temporary name, sync, rename, sync of the folder.

    Each call has a temporary name of its own, so that several processes may write one file: it
    then holds the text of the last one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(".partial", f".{path.name}.", path.parent)
    temporary = Path(name)
    try:
        # Names of files may hold what is no Unicode; it is written as question marks.
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        set_usual_mode(temporary)
        sync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_names(path.parent)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON object atomically, in a folder that is made if it is missing."""
    write_text(path, json.dumps(values, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; anything else is a `DamagedError`."""
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise DamagedError(f"{path} is not JSON ({one_line(error)})") from error
    except RecursionError as error:
        raise DamagedError(f"{path} is too deeply nested") from error
    if not isinstance(values, dict):
        raise DamagedError(f"{path} must hold one JSON object")
    return values


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksums(folder: Path, names: Iterable[str]) -> dict[str, Checksum]:
    """Size and SHA-256 of files, by their paths below `folder` with `/` between folders."""
    names = sorted(names)
    with ThreadPoolExecutor() as threads:
        sums = zip(names, threads.map(lambda name: sha256_of(folder / name), names), strict=True)
        return {n: {"bytes": (folder / n).stat().st_size, "sha256": sha} for n, sha in sums}


def damage_in(
    folder: Path, expected: Mapping[str, Checksum], unread: Container[str] = ()
) -> str | None:
    """One line about the first damaged file of those that `checksums` recorded; None if none is.

    Sizes are compared first, so that a truncated file is found without reading the others; for
    the files in `unread` only the size is compared.
    """
    for name, checksum in expected.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        size = path.stat().st_size
        if size != checksum["bytes"]:
            return f"{path} is damaged: {size} of {checksum['bytes']} bytes"
    for name, checksum in checksums(folder, (n for n in expected if n not in unread)).items():
        if checksum != expected[name]:
            return f"{folder / name} has been altered: its SHA-256 differs from the recorded one"
    return None


@contextmanager
def locked(file: Path, refusal: str) -> Iterator[bool]:
    """Within this context, hold a lock; another process gets a `UserError` with `refusal`.

    Gives whether it is held: some file systems have no locks.
    """
    lock = FileLock(file)
    with _unless_there_are_no_locks(file.parent):
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise UserError(refusal) from error
    try:
        yield lock.is_locked
    finally:
        lock.release()


@contextmanager
def in_turn(file: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Within this context, hold a lock; another process calls `on_wait`, and waits."""
    lock = FileLock(file)
    with _unless_there_are_no_locks(file.parent):
        try:
            lock.acquire(timeout=0)
        except Timeout:
            on_wait()
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _unless_there_are_no_locks(folder: Path) -> Iterator[None]:
    """Within this context, a file system without locks is warned of and used without."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP):
            raise
        logger.warning("%s cannot be locked: do not start a second process there", folder)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it; a `UserError` if that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (PermissionError, FileNotFoundError, NotADirectoryError, FileExistsError) as error:
        raise UserError(
            f"{folder} cannot be made ({error.strerror}). Choose another folder."
        ) from error


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Within this context, one process writes results to a folder, which is made if it is missing.

    Another one gets a `UserError`. A new folder is removed if nothing was written to it.
    """
    was_there = folder.is_dir()
    make_folder(folder)
    lock = folder / LOCK
    refusal = (
        f"{folder} is in use by another dotmoe process. Wait for it, or choose another folder."
    )
    try:
        with locked(lock, refusal):
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
    finally:
        if not was_there:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def require_place_for_weights(out: Path) -> None:
    """Refuse a place inside the folder of a model, of which it would become a part.

    Refuse a name that is not UTF-8 too: safetensors cannot open files there.
    """
    if "\0" in str(out):
        raise UserError(
            f"{str(out)!r} has a NUL character, which no name of a file has. Remove it."
        )
    place = os.fsencode(out.resolve())
    try:
        place.decode("utf-8")
    except UnicodeDecodeError:
        shown = place.decode("utf-8", "backslashreplace")
        raise UserError(f"{shown} is not UTF-8. Choose a folder whose whole path is.") from None
    for folder in out.resolve().parents:
        if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
            raise UserError(f"{out} is inside {folder}, a model. Choose another folder.")


def require_writable(file: Path) -> None:
    """Refuse a file that cannot be written, before anything is paid; its folder is made."""
    if file.is_dir():
        raise UserError(f"{file} is a folder. Name a file to write.")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise UserError(
            f"{file} cannot be written ({error.strerror}). Name another file."
        ) from error


def new_folder(out: Path) -> Path:
    """Resolved path for a new folder; its parent is created if it does not exist.

    Raises a `UserError` if the path exists and is not an empty folder.
    """
    out = out.resolve()  # a link to an empty folder on another disk stays; its target is used
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists already. Remove it, or choose another folder.")
    make_folder(out.parent)
    return out


@contextmanager
def complete_folder(out: Path) -> Iterator[Path]:
    """Within this context, write to a sibling `.OUT.partial`; without error it becomes `out`.

    So `out` is never half-written, even after a power cut. Its files get the usual permissions.
    Raises a `UserError` as `new_folder` does, or if another process writes `out`; if something
    else appeared at `out` meanwhile, the finished folder is kept beside it.
    """
    out = new_folder(out)
    partial, lock = (out.with_name(f".{out.name}.{end}") for end in ("partial", "lock"))
    with locked(lock, f"{out} is being written by another process. Wait for it."):
        try:
            shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
            partial.mkdir()
            yield partial
            for path in (*partial.rglob("*"), partial):
                if path.is_file():
                    set_usual_mode(path)
                    sync(path)
                else:
                    sync_names(path)
            _become(out, partial)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            lock.unlink(missing_ok=True)


def _become(out: Path, partial: Path) -> None:
    """Rename a finished folder to `out`, or to a free name beside it if `out` is not free."""
    try:
        partial.rename(out)  # an empty folder gives way
    except OSError as error:
        if not out.exists():
            raise
        names = (out.with_name(f"{out.name}-{number}") for number in count(2))
        kept = next(name for name in names if not name.exists())
        partial.rename(kept)
        raise UserError(
            f"{out} was made by something else meanwhile. What was to be written there is "
            f"finished, and kept as {kept}."
        ) from error
    sync_names(out.parent)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def require_free(folder: Path, needed_bytes: int) -> None:
    """Refuse to write `needed_bytes` to the disk of `folder` if they do not fit."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise UserError(
            f"{needed_bytes:,} bytes are needed, but {free:,} are free in {folder}. "
            "Make room, or choose another disk."
        )
