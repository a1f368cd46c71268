"""Frozen weights divided over the ranks by FSDP2, and loaded straight into their shards.

Each rank holds its rows of every tensor. A decoder layer is whole only while it runs, so is the
embedding; the head's matrix where `distributed.full_tensor` asks for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dotmoe.checkpoint.tensors import Tensors
from dotmoe.distributed import local_part, own_rows
from dotmoe.models.dense import DenseModel
from dotmoe.parameters import compute_constants, meta_model

Sharding = Literal["auto", "replicate", "shard"]

LARGEST_SHARE = 0.5
"""Of a GPU's memory, that whole weights may take; activations and what is learned need the rest."""


def is_sharded(sharding: Sharding, num_bytes: int, device: torch.device) -> bool:
    """Whether weights of that size are divided over the ranks, if there are several.

    `auto` divides what takes more than half of a GPU's memory.
    """
    if sharding != "auto":
        return sharding == "shard"
    if device.type != "cuda":
        return False
    return num_bytes > LARGEST_SHARE * torch.cuda.get_device_properties(device).total_memory


def load_sharded(
    dense: DenseModel, mesh: DeviceMesh, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """The dense model of a checkpoint, frozen, each rank with its rows of every weight.

    Host memory holds the rows of one tensor besides the shards themselves. Every rank reads the
    files of `dense`, which is described.

    Raises:
        UserError: A tensor is missing, has another shape, or cannot be read.
    """
    family, model, tensors = dense.family, meta_model(dense.config, dtype), Tensors.of(dense)
    tensors.require_shapes(model)
    trunk, head = family.trunk(model), family.head(model)
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    matrix = head.weight
    is_tied = matrix is embedding.weight
    for part in (*family.layers(model), embedding, trunk):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    trunk.to_empty(device=device)
    compute_constants(model, device)
    head.weight = embedding.weight
    if not is_tied:
        shard = distribute_tensor(matrix, mesh, [Shard(0)])  # on the meta device: nothing is sent
        head.weight = nn.Parameter(torch.empty_like(shard, device=device), requires_grad=False)
    for name, parameter in model.named_parameters():
        fill_own_rows(parameter, tensors, name)
    return model


def is_divided(model: nn.Module) -> bool:
    """Whether the ranks hold parts of the weights."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


@contextmanager
def whole_weights(layer: nn.Module) -> Iterator[None]:
    """Inside, a decoder layer that is divided is whole; every rank must come here."""
    if not isinstance(layer, FSDPModule):
        yield
        return
    layer.unshard()
    try:
        yield
    finally:
        layer.reshard()


@torch.no_grad()
def fill_own_rows(parameter: Tensor, tensors: Tensors, name: str) -> None:
    """Read this rank's rows of one tensor."""
    local_part(parameter).copy_(tensors.read_rows(name, own_rows(parameter)))
