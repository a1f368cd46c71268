"""A trained student on disk: a dense checkpoint in the original order of neurons, and a layout."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dotmoe.artifacts import DenseModel
from dotmoe.distributed import from_first, is_first, whole
from dotmoe.finetune.student import Student
from dotmoe.layout import ExpertLayout
from dotmoe.moe.sparse_ffn import SparseFFN
from dotmoe.sharded_weights import checkpoint_dtype

MODEL, LAYOUT = "model", "layout.safetensors"
"""What is written into the stage's folder."""


@torch.no_grad()
def write_student(
    student: Student, layout: ExpertLayout, folder: Path, *, router_dtype: torch.dtype
) -> None:
    """Write `model/` and `layout.safetensors`; all ranks together.

    Adapters are merged first. Tensors that are divided over the ranks are put together one at a
    time; the first rank holds those of one layer in main memory, and writes a file for each.

    Args:
        student: The trained model.
        layout: What it was made with.
        folder: An existing folder; a `model/` in it is replaced.
        router_dtype: Dtype in which router entries are exact in the layout.
    """
    if student.adapters is not None:
        student.adapters.merge()
    out, dense = folder / MODEL, student.dense
    if is_first():
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
    # Not the config's: Transformers sets that to the dtype in which it loaded the model.
    dtype = checkpoint_dtype(None, dense.folder)
    num_layers = len(dense.family.layers(dense.model))
    file_of: dict[str, str] = {}
    total_bytes = 0
    for part in range(num_layers + 1):
        tensors = {}
        for name, tensor in _tensors(student, part):
            full = whole(tensor)
            if is_first():
                tensors[name] = full.to(dtype).cpu().contiguous()
        if is_first():
            file = f"model-{part + 1:05d}-of-{num_layers + 1:05d}.safetensors"
            save_file(tensors, out / file, metadata={"format": "pt"})
            file_of |= dict.fromkeys(tensors, file)
            total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    trained = _trained_layout(student, layout, router_dtype)
    from_first(lambda: _finish(dense, trained, folder, file_of, total_bytes))


def _tensors(student: Student, part: int) -> Iterator[tuple[str, Tensor]]:
    """Stored names and tensors of a layer; after the last one, of all that is in no layer."""
    dense = student.dense
    layers = list(dense.family.layers(dense.model))
    if part == len(layers):
        inside = {id(p) for layer in layers for p in layer.parameters()}
        for name, parameter in dense.model.named_parameters():
            if id(parameter) not in inside:
                yield name, parameter
        return
    ffn = layers[part].get_submodule("mlp")
    for name, parameter in layers[part].named_parameters():
        if not (isinstance(ffn, SparseFFN) and name.startswith("mlp.")):
            yield f"model.layers.{part}.{name}", parameter
    if isinstance(ffn, SparseFFN):
        yield from _ffn_tensors(dense, ffn, part)


def _ffn_tensors(dense: DenseModel, ffn: SparseFFN, layer: int) -> Iterator[tuple[str, Tensor]]:
    """The projections as the checkpoint of the family stores them, some of them fused."""
    fused: dict[str, list[tuple[int, Tensor]]] = {}
    for projection, rows_ND in ffn.dense_rows().items():
        part = dense.family.stored(dense.config, dense.family.ffn_tensor(layer, projection))
        weight = rows_ND.T if projection == "down" else rows_ND
        fused.setdefault(part.stored, []).append((part.rows[0] if part.rows else 0, weight))
    for name, parts in fused.items():
        yield name, torch.cat([weight for _, weight in sorted(parts, key=lambda part: part[0])])


def _trained_layout(student: Student, layout: ExpertLayout, dtype: torch.dtype) -> ExpertLayout:
    """The same experts with the trained routers, centred as extraction does."""
    router_LED = layout.router_LED.clone()
    for layer, ffn in zip(layout.moe_layers, student.ffns, strict=True):
        rows_ED = whole(ffn.router.weight_ED).float().cpu()
        router_LED[layer] = (rows_ED - rows_ED.mean(dim=0, keepdim=True)).to(dtype).float()
    return ExpertLayout(
        expert_of_neuron_LN=layout.expert_of_neuron_LN,
        router_LED=router_LED,
        active_experts=layout.active_experts,
    )


def _finish(
    dense: DenseModel, layout: ExpertLayout, folder: Path, file_of: dict[str, str], total: int
) -> None:
    """What one rank writes: index, config, tokenizer, layout."""
    out = folder / MODEL
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    for name in ("config.json", "generation_config.json"):
        if (dense.folder / name).is_file():
            shutil.copyfile(dense.folder / name, out / name)
    dense.tokenizer.save_pretrained(out)
    layout.save(folder / LAYOUT)
