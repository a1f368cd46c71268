"""Safetensors shards written tensor by tensor; no more than one tensor is in memory."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from dotmoe.errors import UserError
from dotmoe.export.architecture import TensorSpec
from dotmoe.export.dense_tensors import DTYPES
from dotmoe.export.staging import DISK_FULL, full_disk, require_free

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenShards:
    """What was written."""

    files: list[str]
    """File names, in order."""
    total_bytes: int
    """Bytes of all tensors."""


def write_shards(
    specs: Iterable[TensorSpec], folder: Path, *, max_shard_bytes: int
) -> WrittenShards:
    """Write `model.safetensors`, or `model-0000i-of-0000n.safetensors` with an index.

    Args:
        specs: Tensors in the order in which to make them; names must differ, sizes be positive.
        folder: An existing folder.
        max_shard_bytes: Size of a shard; a single larger tensor gets a shard of its own.

    Raises:
        UserError: The disk has, or turns out to have, too little room.
    """
    shards = plan_shards(list(specs), max_shard_bytes)
    total = sum(spec.num_bytes for shard in shards for spec in shard)
    require_free(folder, total)
    names = shard_names(len(shards))
    try:
        for name, shard in zip(names, shards, strict=True):
            with (folder / name).open("wb") as file:
                _write_shard(file, shard)
    except OSError as error:
        if error.errno in DISK_FULL:
            raise full_disk(folder, error, total) from error
        raise
    if len(shards) > 1:
        weight_map = {
            spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard
        }
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return WrittenShards(files=names, total_bytes=total)


def shard_names(count: int) -> list[str]:
    """File names of `count` shards.

    Example:
        >>> shard_names(1)
        ['model.safetensors']
    """
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def plan_shards(specs: list[TensorSpec], max_shard_bytes: int) -> list[list[TensorSpec]]:
    """Fill shards in order, from sizes alone."""
    if max_shard_bytes < 1:
        raise UserError(f"The shard size is {max_shard_bytes} bytes, but it must be positive.")
    shards: list[list[TensorSpec]] = []
    used = max_shard_bytes
    names: set[str] = set()
    for spec in specs:
        # Some servers crash on tensors without elements.
        assert spec.num_bytes > 0, f"{spec.name} is empty"
        assert spec.name not in names, f"{spec.name} comes twice"
        names.add(spec.name)
        if used + spec.num_bytes > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(spec)
        used += spec.num_bytes
    return shards


def _write_shard(file: BinaryIO, shard: list[TensorSpec]) -> None:
    # Widest dtype first keeps every tensor aligned to its own size, as readers expect of a map.
    ordered = sorted(shard, key=lambda spec: -spec.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in ordered:
        end = offset + spec.num_bytes
        header[spec.name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for spec in ordered:
        tensor = spec.make()
        assert tuple(tensor.shape) == spec.shape, f"{spec.name} is {tuple(tensor.shape)}"
        assert tensor.dtype == spec.dtype, f"{spec.name} is {tensor.dtype}"
        file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
