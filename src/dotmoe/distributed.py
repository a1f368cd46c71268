"""The ranks that torchrun started: which one this process is, and what all of them agree on.

Without torchrun there is one rank, and nothing here costs anything. No launcher of our own:
`torchrun --nproc-per-node 8 -m dotmoe convert ...` is the way to start several.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dotmoe.errors import UserError

Result = TypeVar("Result")


def rank() -> int:
    """Number of this process among the ranks, 0 to `num_ranks() - 1`."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """How many processes work together; 1 without torchrun."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this is the rank that writes files and talks to the user."""
    return rank() == 0


def started_by_torchrun() -> bool:
    """Whether torchrun's environment names more than one rank."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def joined(device: torch.device) -> Iterator[None]:
    """Inside, the ranks that torchrun started form one group; alone, nothing happens.

    Args:
        device: Kind of device the ranks compute on; on CUDA each takes the GPU of its local rank.
    """
    if not started_by_torchrun() or dist.is_initialized():
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh(device: torch.device) -> DeviceMesh | None:
    """All ranks in one line, for sharding over them; None where there is one rank."""
    if num_ranks() == 1:
        return None
    return init_device_mesh(device.type, (num_ranks(),))


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum in place, and return it: the same bits on every rank."""
    if num_ranks() > 1:
        dist.all_reduce(values)
    return values


def from_first(make: Callable[[], Result]) -> Result:
    """Run `make` on the first rank alone; every rank gets its result, or its error.

    Args:
        make: Gives something that can be pickled. A `UserError` it raises is raised on every rank,
            so that no rank waits for one that has gone; any other error too, in words.
    """
    if num_ranks() == 1:
        return make()
    outcome: list[Any] = [None, None]
    own: BaseException | None = None
    if is_first():
        try:
            outcome[0] = make()
        except BaseException as error:
            own = error
            outcome[1] = (isinstance(error, UserError), str(error))
    dist.broadcast_object_list(outcome, src=0)
    if own is not None:
        raise own
    if outcome[1] is not None:
        foreseen, message = outcome[1]
        raise UserError(message) if foreseen else RuntimeError(f"the first rank failed: {message}")
    result: Result = outcome[0]
    return result


def wait_for_all() -> None:
    """Return when every rank has come here."""
    if num_ranks() > 1:
        dist.barrier()
