"""The ranks that torchrun started: which one this process is, and what all of them agree on.

Without torchrun there is one rank, and nothing here costs anything. No launcher of our own:
`torchrun --nproc-per-node 8 -m dotmoe convert ...` is the way to start several.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dotmoe.errors import RankError, UserError

Result = TypeVar("Result")

PATIENCE = timedelta(days=1)
"""How long a rank waits for another. The first one tokenises alone, which can take hours; and a
rank that has died keeps nobody waiting, because torchrun then ends the others."""

_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


class _ToldElsewhereError(UserError):
    """An error that another rank tells as well."""


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

    Raises:
        UserError: Another rank has gone.
        RankError: Of a `UserError` in the block that the first rank does not know of.
    """
    if not started_by_torchrun() or dist.is_initialized():
        yield
        return
    if device.type == "cuda":
        _take_own_gpu(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=PATIENCE)
    if not is_first():
        logging.disable(logging.WARNING)  # what the first warns of
    try:
        yield
    except UserError as error:
        if is_first() or isinstance(error, _ToldElsewhereError):
            raise
        raise RankError(f"rank {rank()}: {error}") from error
    except RuntimeError as error:
        if not any(sign in str(error) for sign in _GONE):
            raise
        gone = "another rank has gone, and its own message says why. Mend that and start again."
        raise UserError(gone) from error
    finally:
        logging.disable(logging.NOTSET)
        dist.destroy_process_group()


def _take_own_gpu(local_rank: int) -> None:
    there_are = torch.cuda.device_count()
    if local_rank >= there_are:
        raise RankError(
            f"rank {local_rank} of this machine has no GPU: there are {there_are}. Start torchrun "
            f"with --nproc-per-node {there_are}."
        )
    torch.cuda.set_device(local_rank)


def mesh(device: torch.device) -> DeviceMesh | None:
    """All ranks in one line, for sharding over them; None where there is one rank."""
    if num_ranks() == 1:
        return None
    return init_device_mesh(device.type, (num_ranks(),))


def require_equal_shares(batch_size: int) -> None:
    """Refuse a batch that the ranks cannot share equally.

    Raises:
        UserError: The nearest sizes that they can share are named.
    """
    over = batch_size % num_ranks()
    if over:
        nearest = [size for size in (batch_size - over, batch_size - over + num_ranks()) if size]
        raise UserError(
            f"batch_size is {batch_size}, but {num_ranks()} ranks must share it equally. "
            f"Choose {' or '.join(map(str, nearest))}."
        )


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum in place, and return it: the same bits on every rank."""
    if num_ranks() > 1:
        dist.all_reduce(values)
    return values


def from_first(make: Callable[[], Result]) -> Result:
    """Run `make` on the first rank alone; every rank gets its result, or its error.

    Args:
        make: Gives something that can be pickled. Where it fails, the first rank raises its error,
            and the others a `UserError`, so that no rank waits for one that has gone.
    """
    if num_ranks() == 1:
        return make()
    result, own = _attempt(make) if is_first() else (None, None)
    outcome: list[Any] = [result, None if own is None else _in_words(own)]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise own or _ToldElsewhereError(outcome[1])
    shared: Result = outcome[0]
    return shared


def on_every_rank(make: Callable[[], Result]) -> Result:
    """Run `make` on every rank; if it fails on one, every rank fails, with the words of that one.

    Args:
        make: Has no collective in it, which a rank that failed would leave the others waiting in.
    """
    if num_ranks() == 1:
        return make()
    result, own = _attempt(make)
    failures: list[Any] = [None] * num_ranks()
    dist.all_gather_object(failures, None if own is None else _in_words(own))
    failed = [number for number, words in enumerate(failures) if words is not None]
    if not failed:
        return result  # type: ignore[return-value]
    if own is not None and (is_first() or not isinstance(own, UserError)):
        raise own
    words = f"rank {failed[0]}: {failures[failed[0]]}"
    raise UserError(words) if is_first() else _ToldElsewhereError(words)


def _attempt(make: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    try:
        return make(), None
    except Exception as error:  # noqa: BLE001  (told to every rank and raised there)
        return None, error


def _in_words(error: Exception) -> str:
    return str(error) or type(error).__name__


def wait_for_all() -> None:
    """Return when every rank has come here."""
    if num_ranks() > 1:
        dist.barrier()


@dataclass(frozen=True, slots=True)
class Division:
    """Which of `length` layers belong to which rank, and tensors with a row for each of them.

    The first rank owns the first layers, and so on: equal numbers, as `torch.chunk` and DTensor's
    `Shard(0)` cut them, the last ranks fewer or none.
    """

    length: int
    mesh: DeviceMesh | None
    """The ranks; None: one, which owns everything."""

    @property
    def num_ranks(self) -> int:
        """How many share the layers."""
        return 1 if self.mesh is None else self.mesh.size()

    def owned_by(self, rank: int) -> slice:
        """Layers of a rank."""
        size = -(-self.length // self.num_ranks)
        return slice(min(rank * size, self.length), min((rank + 1) * size, self.length))

    @property
    def own(self) -> slice:
        """Layers of this rank."""
        return self.owned_by(0 if self.mesh is None else self.mesh.get_local_rank())

    def rounds(self) -> Iterator[list[int]]:
        """Layers that the ranks can work on at the same time: one of each rank."""
        owned = [range(self.length)[self.owned_by(number)] for number in range(self.num_ranks)]
        for turn in range(len(owned[0])):
            yield [layers[turn] for layers in owned if turn < len(layers)]

    def divided(self, whole: Tensor) -> Tensor:
        """A copy of the own layers, see `known`."""
        return self.known(whole[self.own].clone())

    def known(self, part: Tensor) -> Tensor:
        """The own layers as a DTensor that knows itself to be part of a whole; alone, as it is."""
        if self.mesh is None:
            return part
        whole = torch.empty(self.length, *part.shape[1:], device="meta")
        return DTensor.from_local(
            part,
            self.mesh,
            [Shard(0)],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )

    def gathered(self, part: Tensor) -> Tensor:
        """Every rank's layers together, the same bits on every rank; alone, `part` itself."""
        if self.mesh is None:
            return part
        whole = part.new_empty(self.length, *part.shape[1:])
        whole[self.own] = part
        for owner, layers in self._owners():
            dist.broadcast(whole[layers], src=owner)
        return whole

    def summed(self, whole: Tensor) -> Tensor:
        """The own layers of the sum over ranks. `whole` is used up; alone, it is the result."""
        for owner, layers in self._owners():
            dist.reduce(whole[layers], dst=owner)
        return whole[self.own]

    def _owners(self) -> list[tuple[int, slice]]:
        """Ranks with layers, and their layers; none where one rank needs no other."""
        if self.mesh is None:
            return []
        slices = ((rank, self.owned_by(rank)) for rank in range(self.num_ranks))
        return [(rank, layers) for rank, layers in slices if layers.start < layers.stop]


def own_rows(tensor: Tensor) -> slice:
    """Which rows this rank holds of a tensor that may be divided."""
    mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
    return Division(len(tensor), mesh).own


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be divided; every rank must ask at the same point."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
