"""The device, and communication between torchrun's ranks; without torchrun there is one rank."""

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dotmoe.common.cgroups import memory_limit
from dotmoe.common.errors import RankError, UserError, one_line

Result = TypeVar("Result")
Group = dist.ProcessGroup | None
"""A group of all ranks; None: the default one."""

_MATMUL: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
# Rank 0 tokenises alone, which can take hours; if a rank has died, torchrun ends the others.
_LONGEST_WAIT = timedelta(days=1)


class _ReportedElsewhereError(UserError):
    """An error that another rank reports as well."""


def resolved_device(name: str) -> torch.device:
    """The device that `auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:N` means here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", str(name)):
        raise UserError(f"device is {name!r}, but it must be auto, cpu, cuda or cuda:N. Name one.")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"device is {name!r}, which this machine does not have ({one_line(error)[:160]}). "
            f"{_devices_here()}"
        ) from error
    return torch.device(name)


def _devices_here() -> str:
    """What to choose instead of a device that is not there."""
    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if number == 0:
        return (
            "No GPU with CUDA is found here. Choose cpu, or install a build of torch for your GPU."
        )
    return f"Choose cpu, or cuda:0 to cuda:{number - 1}."


@contextmanager
def in_float32() -> Iterator[None]:
    """Within this context, float32 products are float32 throughout: no TF32, bfloat16 or autocast.

    A user or a library may have allowed these for the whole process. Also decorates functions.
    """
    with _products("highest"), ExitStack() as changed:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                changed.enter_context(torch.autocast(device, enabled=False))
        yield


@in_float32()
def product_in_float32(left: Tensor, right: Tensor) -> Tensor:
    """Matrix product, at least in float32: so are sums and result for 16-bit factors."""
    if left.dtype not in (torch.bfloat16, torch.float16):
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


@contextmanager
def in_fast_products() -> Iterator[None]:
    """Within this context, factors of float32 products may be rounded where that is faster.

    To TF32 on GPUs, to bfloat16 on CPUs that multiply it in hardware: cuBLAS and oneDNN know where.
    Sums stay float32, and so does what runs within `in_float32`. Also decorates functions.
    """
    with _products("medium"):
        yield


@contextmanager
def _products(precision: str) -> Iterator[None]:
    """Within this context, torch has this precision of float32 products, by both of its names."""
    before = [backend.fp32_precision for backend in _MATMUL]
    name = ""
    with suppress(RuntimeError):  # torch does not tell once `fp32_precision` of a backend was set
        name = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        if name:
            torch.set_float32_matmul_precision(name)
        for backend, own in zip(_MATMUL, before, strict=True):
            backend.fp32_precision = own


def memory_of(device: torch.device) -> int:
    """Bytes of memory: of the GPU; for the CPU of this machine, or of this process's container."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(whole, memory_limit() or whole)


def has_room(device: torch.device, num_bytes: int) -> bool:
    """Whether so many bytes take at most half of a GPU's free memory; False for other devices."""
    if device.type != "cuda":
        return False
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return 2 * num_bytes <= torch.cuda.mem_get_info(device)[0] + unused


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


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded; all ranks must call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_rows(tensor: Tensor) -> slice:
    """Rows that this rank holds of a tensor that may be sharded."""
    if not isinstance(tensor, DTensor):
        return slice(0, len(tensor))
    layout = tensor.shape, tensor.device_mesh, tensor.placements
    shape, offset = compute_local_shape_and_global_offset(*layout)
    return slice(offset[0], offset[0] + shape[0])


def divided(whole: Tensor, ranks: DeviceMesh | None) -> Tensor:
    """A copy of a tensor that is equal on all ranks, its rows sharded as `torch.chunk` cuts."""
    if ranks is None:
        return whole.clone()
    return distribute_tensor(whole.clone(), ranks, [Shard(0)], src_data_rank=None)


def as_divided(part: Tensor, length: int, ranks: DeviceMesh | None) -> Tensor:
    """A sharded tensor of `length` rows from the `part` of each rank; with one rank, `part`."""
    if ranks is None:
        return part
    whole = torch.empty(length, *part.shape[1:], device="meta")
    return DTensor.from_local(
        part, ranks, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def summed_rows(whole: Tensor, ranks: DeviceMesh | None) -> Tensor:
    """This rank's rows of the sum of `whole` over ranks; with one rank, `whole` itself."""
    if ranks is None:
        return whole
    partial = DTensor.from_local(whole, ranks, [Partial()], run_check=False)
    return partial.redistribute(placements=[Shard(0)]).to_local()
