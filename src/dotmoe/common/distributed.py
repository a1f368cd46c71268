"""Communication between torchrun's ranks; without torchrun there is one rank."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dotmoe.common.errors import RankError, UserError

Result = TypeVar("Result")
Group = dist.ProcessGroup | None
"""A group of all ranks; None: the default one."""

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
# Rank 0 tokenises alone, which can take hours; if a rank has died, torchrun ends the others.
_LONGEST_WAIT = timedelta(days=1)


class _ReportedElsewhereError(UserError):
    """An error that another rank reports as well."""


def rank() -> int:
    """Number of this process among the ranks, 0 to `num_ranks() - 1`."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """How many processes work together; 1 without torchrun."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_rank_zero() -> bool:
    """Whether this is the rank that writes files and prints."""
    return rank() == 0


def started_by_torchrun() -> bool:
    """Whether torchrun's environment names more than one rank."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def require_one_process(what: str) -> None:
    """Raise a `UserError` for `what` if torchrun started several ranks."""
    if started_by_torchrun():
        raise UserError(
            f"{what} runs in one process, but torchrun started several. Start without torchrun."
        )


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Within this context, torchrun's ranks form one group; without torchrun nothing happens.

    On CUDA each rank takes the GPU of its local rank. Raises a `UserError` if another rank has
    gone; a `UserError` in the block that rank 0 does not know of becomes a `RankError`.
    """
    if not started_by_torchrun() or dist.is_initialized():
        yield
        return
    if device.type == "cuda":
        _take_gpu()
    dist.init_process_group(_BACKENDS[device.type], timeout=_LONGEST_WAIT)
    if device.type == "cuda":  # between GPUs nobody waits for rank 0's work on files
        group: Any = dist.distributed_c10d._get_default_group()
        group._get_backend(device)._set_default_timeout(timedelta(minutes=30))
    if not is_rank_zero():
        logging.disable(logging.WARNING)  # rank 0 warns of the same
    try:
        with _errors_of_ranks():
            yield
    finally:
        logging.disable(logging.NOTSET)
        dist.destroy_process_group()


def _take_gpu() -> None:
    """Make the GPU of this process's local rank its current one."""
    local_rank, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= num_gpus:
        raise RankError(
            f"rank {local_rank} of this machine has no GPU: there are {num_gpus}. Start "
            f"torchrun with --nproc-per-node {num_gpus}."
        )
    torch.cuda.set_device(local_rank)


@contextmanager
def _errors_of_ranks() -> Iterator[None]:
    """Within this context, errors say which rank has them.

    A `UserError` of this rank alone becomes a `RankError`; a broken connection becomes a
    `UserError`: another rank has gone.
    """
    try:
        yield
    except UserError as error:
        if is_rank_zero() or isinstance(error, _ReportedElsewhereError):
            raise
        raise RankError(f"rank {rank()}: {error}") from error
    except RuntimeError as error:
        # NCCL and the store have error types of their own; gloo's are known by their source file.
        if not isinstance(error, dist.DistError) and "/gloo/" not in str(error):
            raise
        raise UserError("another rank has gone; its own message gives the cause to fix.") from error


def mesh(device: torch.device) -> DeviceMesh | None:
    """One-dimensional mesh of all ranks, to shard over; None if there is one rank."""
    return init_device_mesh(device.type, (num_ranks(),)) if num_ranks() > 1 else None


@contextmanager
def fsdp_mesh(device: torch.device, *, shard: bool) -> Iterator[DeviceMesh]:
    """Within this context, the mesh for FSDP2: ranks hold shards (`shard`) or whole tensors.

    A process without a group gets one of its own while the block lasts.
    """
    is_alone = not dist.is_initialized()
    if is_alone:
        dist.init_process_group(_BACKENDS[device.type], store=HashStore(), rank=0, world_size=1)
    try:
        shape = (num_ranks(),) if shard else (num_ranks(), 1)
        names = ("shard",) if shard else ("replicate", "shard")
        yield init_device_mesh(device.type, shape, mesh_dim_names=names)
    finally:
        if is_alone:
            dist.destroy_process_group()


def require_equal_shares(batch_size: int) -> None:
    """Refuse a batch that the ranks cannot share equally."""
    if batch_size % num_ranks():
        raise UserError(
            f"batch_size is {batch_size}, but {num_ranks()} ranks must share it equally. "
            f"Choose a multiple of {num_ranks()}."
        )


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum a tensor over ranks in place and return it, with the same bits on every rank."""
    if num_ranks() > 1:
        dist.all_reduce(values)
    return values


def summed_parts(own: Tensor) -> Tensor:
    """Sum over ranks. The gradient flows to this rank's `own` alone.

    So every rank must start its backward pass from the same loss.
    """
    if num_ranks() == 1:
        return own
    return own - own.detach() + sum_over_ranks(own.detach().clone())


def gathered_rows(own: Tensor) -> Tensor:
    """Rows of all ranks, [ranks * R, ...], in the order of ranks; carries no gradient.

    Every rank must give as many rows.
    """
    if num_ranks() == 1:
        return own
    rows = own.new_empty(num_ranks() * len(own), *own.shape[1:])
    dist.all_gather_into_tensor(rows, own.contiguous())
    return rows


def group_for_a_thread() -> Group:
    """A new group of all ranks, in which a thread may talk while others do; None without ranks."""
    return dist.new_group(backend="gloo", timeout=_LONGEST_WAIT) if dist.is_initialized() else None


def raise_on_all_ranks(make: Callable[[], Result], group: Group = None) -> Result:
    """Run `make` on every rank; if it fails on one, every rank raises, with that rank's message.

    `make` must not communicate: a rank that fails would leave the others waiting.
    """
    if num_ranks() == 1:
        return make()
    own: Exception | None = None
    try:
        result = make()
    except Exception as error:  # noqa: BLE001  (reported to every rank and raised there)
        own = error
    failures = gathered(None if own is None else str(own) or type(own).__name__, group)
    failed = [f"rank {number}: {text}" for number, text in enumerate(failures) if text is not None]
    if not failed:
        return result
    if own is not None and (is_rank_zero() or not isinstance(own, UserError)):
        raise own
    raise UserError(failed[0]) if is_rank_zero() else _ReportedElsewhereError(failed[0])


def gathered(own: Result, group: Group = None) -> list[Result]:
    """What each rank gives, pickled, in the order of ranks; all must call this."""
    results = [own] * num_ranks()
    if num_ranks() > 1:
        dist.all_gather_object(results, own, group)
    return results


def broadcast_from_rank_zero(make: Callable[[], Result], group: Group = None) -> Result:
    """Run `make` on rank 0 alone; every rank gets its result, pickled, or its error."""
    made = raise_on_all_ranks(lambda: make() if is_rank_zero() else None, group)
    return gathered(made, group)[0]  # type: ignore[return-value]
