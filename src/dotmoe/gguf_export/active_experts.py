"""k of a written file, changed in place."""

import json
from pathlib import Path

import numpy as np

from dotmoe.errors import UserError
from dotmoe.export.record import RECORD_FILE
from dotmoe.gguf_export.gguf_file import GgufFile
from dotmoe.llama_cpp import most_active_experts


def set_active_experts(path: Path, active_experts: int) -> None:
    """Change how many experts a GGUF runs; the file is then what an export with that k writes.

    The count is one metadata key, and what makes the weights of the chosen experts 1 is another
    (`glm4moe`) or a tensor a layer (`llama`). All of them have a fixed size, so nothing moves. The
    k in a `dotmoe.json` beside the file follows; its measurements stay those of the export.

    Args:
        path: A GGUF written by `export_gguf`.
        active_experts: k, 1 to the number of experts.

    Raises:
        UserError: No such file, not one of ours, or k out of range; the file is unchanged then.
    """
    file = GgufFile(path)
    arch = file.arch
    experts = file.metadata(f"{arch}.expert_count")
    if experts is None:
        raise UserError(f"{path} holds a dense model, which has no experts. Name a MoE's file.")
    if not 1 <= active_experts <= experts:
        raise UserError(
            f"active_experts is {active_experts}, but {path} has {experts} experts a layer. "
            f"Choose 1 to {experts}."
        )
    layers, dense = file.metadata(f"{arch}.block_count"), f"{arch}.leading_dense_block_count"
    most = most_active_experts(len(file.names), layers, layers - (file.metadata(dense) or 0))
    if active_experts > most:
        raise UserError(
            f"active_experts is {active_experts}, but llama.cpp's graph has room for {most} in "
            f"{path}, and it aborts beyond. Choose {most} or fewer."
        )
    used_key, weight_key = f"{arch}.expert_used_count", f"{arch}.expert_weights_scale"
    scales = sorted(name for name in file.names if name.endswith(".ffn_down_exps.scale"))
    factor = file.metadata(weight_key) if arch == "glm4moe" else _common(file, scales)
    if factor != file.metadata(used_key):
        raise UserError(
            f"{path} does not weight its experts by k, so k is no free choice in it. "
            "Name a file that dotmoe exported."
        )
    del file
    writable = GgufFile(path, writable=True)
    for key, value in {used_key: active_experts, weight_key: float(active_experts)}.items():
        field = writable.reader.fields.get(key)
        if field is not None:
            field.parts[field.data[0]][0] = value
    for name in scales:
        writable.raw(name)[:] = np.float32(active_experts)
    writable.reader.data.flush()
    _follow(path.parent / RECORD_FILE, active_experts)


def _common(file: GgufFile, scales: list[str]) -> float | None:
    """The one value that all scales hold."""
    values = {float(value) for name in scales for value in file.tensor(name)}
    return values.pop() if len(values) == 1 else None


def _follow(record: Path, active_experts: int) -> None:
    if record.is_file():
        values = json.loads(record.read_text(encoding="utf-8"))
        record.write_text(json.dumps({**values, "active_experts": active_experts}, indent=2) + "\n")
