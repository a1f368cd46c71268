"""Writes a model in memory as a dense checkpoint."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from dotmoe.common.distributed import is_rank_zero
from dotmoe.common.files import save_tensors, write_json
from dotmoe.common.sharded import full_tensor
from dotmoe.models.checkpoint import INDEX, Tensors
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.targets import TARGETS
from dotmoe.models.tokenizer import copy_beside_weights


def write_weights(dense: DenseModel, out: Path) -> None:
    """Replace `out` by a dense checkpoint, a file per layer; all ranks call this together."""
    dense.require("memory", "shards")
    if is_rank_zero():
        begin_checkpoint(dense, out)
    # Not the config's dtype: Transformers sets that to the dtype in which it loaded the model.
    dtype = Tensors.of(dense).dtype
    num_files = len(dense.family.layers(dense.model)) + 1
    weight_map = dict[str, str]()
    total = 0
    for number, parts in enumerate(_by_layers(dense), 1):
        file = f"model-{number:05d}-of-{num_files:05d}.safetensors"
        tensors = dict[str, Tensor]()
        for name, part in parts.items():
            whole = full_tensor(part)
            if is_rank_zero():
                tensors[name] = whole.to(dtype).cpu()
        if is_rank_zero():
            save_tensors(tensors, out / file, format="pt")
            weight_map |= dict.fromkeys(tensors, file)
            total += sum(tensor.nbytes for tensor in tensors.values())
    if is_rank_zero():
        write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def begin_checkpoint(dense: DenseModel, out: Path) -> None:
    """Replace `out` by a folder with all files of a dense checkpoint except its weights."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    shutil.copyfile(dense.folder / "config.json", out / "config.json")
    if Tensors.of(dense).left_out:  # the text model alone remains
        dense.config.save_pretrained(out)
    copy_beside_weights(dense, out)


def _by_layers(dense: DenseModel) -> Iterator[dict[str, Tensor]]:
    """Yield each layer's tensors by their checkpoint names, then those that are in no layer."""
    rest: dict[str, Tensor] = dict(dense.model.named_parameters())
    family = dense.family
    for index, layer in enumerate(family.layers(dense.model)):
        prefix = f"model.layers.{index}."
        ffn = family.block(layer, TARGETS["ffn"])
        of_ffn = f"{prefix}{family.own_name('mlp')}."
        parts = {name: rest.pop(name) for name in list(rest) if name.startswith(prefix)}
        if dense_rows := getattr(ffn, "dense_rows", None):  # of an order of its own
            parts = {name: p for name, p in parts.items() if not name.startswith(of_ffn)}
            for projection, rows_ND in dense_rows().items():
                plain_name = family.ffn_tensor(index, projection)
                name = family.stored(dense.config, plain_name).stored
                weight = rows_ND.T if projection == "down" else rows_ND
                # In a fused projection the gate's rows come first.
                parts[name] = torch.cat([parts[name], weight]) if name in parts else weight
        yield parts
    yield rest
