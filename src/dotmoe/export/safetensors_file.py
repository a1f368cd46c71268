"""Safetensors files written tensor by tensor; no more than one tensor is in memory."""

import json
from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import BinaryIO

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from dotmoe.checkpoint.tensors import DTYPES
from dotmoe.export.format import BLOCKS, TensorSpec
from dotmoe.files import require_free
from dotmoe.progress import Update, no_update


def write_checkpoint(
    specs: Iterable[TensorSpec], folder: Path, max_bytes: int, on_progress: Update = no_update
) -> list[str]:
    """Write `model.safetensors`, or `model-0000i-of-0000n.safetensors` with an index.

    Args:
        specs: Tensors in the order in which to make them; names must differ, sizes be positive.
        folder: An existing folder.
        max_bytes: Largest size of a file; a single larger tensor gets a file of its own.
        on_progress: Told tensors.

    Returns:
        Names of the weight files, in order.

    Raises:
        UserError: The disk has too little room.
    """
    by_name: dict[str, TensorSpec] = {}
    for spec in specs:
        # Some servers crash on tensors without elements.
        assert spec.num_bytes > 0, f"{spec.name} is empty"
        assert spec.name not in by_name, f"{spec.name} comes twice"
        by_name[spec.name] = spec
    plan = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda spec: spec.num_bytes,
        filename_pattern="model{suffix}.safetensors",
        get_storage_id=lambda spec: None,
        max_shard_size=max_bytes,
    )
    total = sum(spec.num_bytes for spec in by_name.values())
    require_free(folder, total)
    done = 0
    for file_name, names in plan.filename_to_tensors.items():
        with (folder / file_name).open("wb") as file:
            for _ in _written(file, [by_name[name] for name in names]):
                done += 1
                on_progress(done, len(by_name), "tensors written")
    if plan.is_sharded:
        index = {"metadata": {"total_size": total}, "weight_map": plan.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return list(plan.filename_to_tensors)


def _written(file: BinaryIO, specs: list[TensorSpec]) -> Iterator[str]:
    # Widest number format first keeps every tensor aligned to its own size, as maps expect.
    ordered = sorted(specs, key=lambda spec: -BLOCKS[spec.stored][1])
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ends = list(accumulate((spec.num_bytes for spec in ordered), initial=0))
    for spec, offsets in zip(ordered, pairwise(ends), strict=True):
        header[spec.name] = {"dtype": spec.stored, "shape": spec.shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for spec in ordered:
        tensor = spec.make().to(DTYPES[spec.stored]).contiguous()
        assert tuple(tensor.shape) == spec.shape, f"{spec.name} is {tuple(tensor.shape)}"
        file.write(tensor.view(-1).view(torch.uint8).numpy().data)
        yield spec.name
