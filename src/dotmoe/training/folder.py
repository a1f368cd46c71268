"""Files of a training stage in its folder: checkpoints, and the metrics of each step.

A checkpoint is written atomically: a folder `step_00000100` with the files of
`torch.distributed.checkpoint`. Every rank must see the same folder.
"""

import errno
import json
import logging
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as checkpoint_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dotmoe.common.device import memory_of
from dotmoe.common.distributed import (
    Group,
    broadcast_from_rank_zero,
    group_for_a_thread,
    is_rank_zero,
)
from dotmoe.common.errors import UserError, one_line
from dotmoe.common.files import complete_folder, remove
from dotmoe.common.sharded import local_part

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is fine
logging.getLogger().addFilter(lambda record: record.module != "state_dict_loader")  # tracebacks

Metrics = dict[str, float]
OnStep = Callable[[int, Metrics], None]
"""Callback that takes the number of a step, counted from 1, and its metrics."""


class Checkpoints:
    """The checkpoints in a stage's folder: the two newest, or the newest while one is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkpoints"
        self._thread: ThreadPoolExecutor | None = None
        self._group: Group = None
        self._writing: Future[None] | None = None

    @contextmanager
    def thread(self) -> Iterator[None]:
        """Within this context, which all ranks enter, `save` need not wait; its end does."""
        self._group = group_for_a_thread()
        with ThreadPoolExecutor(1) as self._thread:
            yield

    def is_writing(self) -> bool:
        """Whether this rank still writes in the background."""
        return self._writing is not None and not self._writing.done()

    def finish(self) -> None:
        """Wait for what is under way, and raise its error, on all ranks alike."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def save(self, step: int, tensors: dict[str, Tensor], *, wait: bool = True) -> None:
        """Write a checkpoint atomically, after the one under way. All ranks must call it.

        All but the newest are deleted first, so that the disk never holds three. Plain tensors
        are equal on all ranks; each rank writes its part of a DTensor. If this fails (`OSError`:
        the disk is full), nothing is left of it, and the newest stays.

        With `wait` False it is written in the background, from a copy in host memory, unless the
        copies of this machine's ranks would take over a quarter of that; `finish` raises its error.
        """
        self.finish()
        copied = sum(local_part(tensor).nbytes for tensor in tensors.values())
        copied *= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if wait or self._thread is None or copied > memory_of(torch.device("cpu")) / 4:
            self._write(step, tensors)
        else:
            copies: Any = DefaultStager(StagingOptions(False, False, False, False)).stage(tensors)
            self._writing = self._thread.submit(self._write, step, copies)

    def _write(self, step: int, tensors: dict[str, Tensor]) -> None:
        with ExitStack() as writing:

            def begin() -> Path:
                for half_written in self.folder.glob(".step_*"):  # by a process that was killed
                    remove(half_written)
                for old in sorted(self.folder.glob("step_*"))[:-1]:
                    shutil.rmtree(old, ignore_errors=True)
                return writing.enter_context(complete_folder(self.folder / f"step_{step:08d}"))

            partial = broadcast_from_rank_zero(begin, self._group)
            try:
                writer = FileSystemWriter(partial)
                save(dict(tensors), storage_writer=writer, process_group=self._group)
            except CheckpointException as error:
                raise _cause_of(error) from error

            broadcast_from_rank_zero(writing.close, self._group)

    def load(self, tensors: dict[str, Tensor]) -> int:
        """Fill tensors in place from the newest checkpoint, and return its number of steps.

        All ranks must call it; their number may have changed. Returns 0 if there is no checkpoint.
        Raises a `UserError` if a file of it is missing or truncated, or it holds other tensors.
        """
        newest = broadcast_from_rank_zero(self.newest)
        if newest is None:
            return 0
        reader = _Reader(newest)
        try:
            reader.read_metadata()  # here first: torch 2.11 does not pass on why it fails in `load`
            with torch.no_grad():
                load(dict(tensors), storage_reader=reader)
        except (CheckpointException, pickle.UnpicklingError, EOFError, OSError) as error:
            raise UserError(
                f"{newest} is damaged or does not fit this run "
                f"({one_line(_cause_of(error))[:160]}). Delete it, and the run goes on from one "
                "before it, if any."
            ) from error
        return int(newest.name.removeprefix("step_"))

    def newest(self) -> Path | None:
        """The newest checkpoint, None if there is none."""
        return max(self.folder.glob("step_*"), default=None)


_KNOWN = {
    (each.__module__, each.__qualname__): each
    for each in (
        checkpoint_metadata.Metadata,
        checkpoint_metadata.MetadataIndex,
        checkpoint_metadata.StorageMeta,
        checkpoint_metadata.TensorStorageMetadata,
        checkpoint_metadata.ChunkStorageMetadata,
        checkpoint_metadata.TensorProperties,
        checkpoint_metadata._MEM_FORMAT_ENCODING,
        _StorageInfo,
        torch.Size,
        torch.serialization._get_layout,
    )
}
"""All but dtypes and paths that a checkpoint's metadata name, by module and name."""
_PATHS = {("pathlib", "PosixPath"), ("pathlib", "WindowsPath"), ("pathlib._local", "PosixPath")}


class _Reader(FileSystemReader):
    """Reads a checkpoint whose metadata may come from anyone: it runs no code from them."""

    def read_metadata(self, *args: Any, **options: Any) -> checkpoint_metadata.Metadata:
        """The metadata; raises `UnpicklingError` for anything that they need not hold."""
        with self.fs.create_stream(self._get_metadata_path(options.get("rank")), "rb") as file:
            metadata: checkpoint_metadata.Metadata = _MetadataUnpickler(file).load()
        metadata.storage_meta = checkpoint_metadata.StorageMeta(load_id=self.load_id)
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles what `torch.distributed.checkpoint` records about tensors, and nothing else.

    `BytesStorageMetadata` is refused too: torch unpickles what it points to.
    """

    def find_class(self, module: str, name: str) -> Any:
        """The class of a global name; raises `UnpicklingError` for one that is not known."""
        if module == "torch":
            found = getattr(torch, name, None)
            if isinstance(found, torch.dtype):
                return found
        if (module, name) in _PATHS:
            return Path
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        raise pickle.UnpicklingError(f"its metadata name {module}.{name}, which no checkpoint has")


def _cause_of(error: BaseException) -> BaseException:
    """The underlying error, that of the first rank that failed."""
    if not isinstance(error, CheckpointException):
        return error
    cause, _ = next(iter(error.failures.values()))
    if "inline_container" in str(cause):  # torch's file writer, which hides the system's error
        return OSError(errno.ENOSPC, "a file of the checkpoint was truncated")
    return cause


@contextmanager
def metrics_log(folder: Path, steps_taken: int) -> Iterator[OnStep]:
    """Within this context, a callback that writes a step to `metrics.jsonl`; only rank 0 writes.

    Entries after the checkpoint's steps (`steps_taken`) are removed.
    """
    if not is_rank_zero():
        yield lambda step, metrics: None
        return
    path = folder / "metrics.jsonl"
    path.touch()
    with path.open("rb") as lines:  # one for each step
        kept = sum(map(len, islice(lines, steps_taken)))
    os.truncate(path, kept)  # needs no disk space, so a full disk loses nothing
    with path.open("a", encoding="utf-8") as file:

        def log(step: int, metrics: Metrics) -> None:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
            file.flush()

        yield log
