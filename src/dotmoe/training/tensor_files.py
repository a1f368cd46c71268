"""Tensors to and from a folder by `torch.distributed.checkpoint`, which reshards DTensors."""

import errno
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dotmoe.distributed import num_ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """What is known of a stored tensor before it is read."""

    shape: torch.Size
    """Of the whole tensor, over all ranks."""
    dtype: torch.dtype


def write_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write tensors, each once, and sync them; all ranks together.

    Args:
        tensors: By name, the same names on all ranks; plain or DTensors.
        folder: Empty.

    Raises:
        OSError: As the system reports it.
    """
    with _alone_or_together():
        save(dict(tensors), storage_writer=FileSystemWriter(folder))


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Shape and dtype of every tensor in a folder, by name."""
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: StoredTensor(shape=entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    """Fill tensors in place; all ranks together, in any number.

    Args:
        tensors: By name, of the stored shapes; plain or DTensors of any placement.
        folder: Written by `write_tensors`.
    """
    with _alone_or_together(), torch.no_grad():
        load(dict(tensors), storage_reader=FileSystemReader(folder))


@contextmanager
def _alone_or_together() -> Iterator[None]:
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
