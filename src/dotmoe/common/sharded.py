"""Tensors whose rows are divided among ranks; with one rank they are plain tensors."""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


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
