"""GGUF, the container of llama.cpp: written tensor by tensor, read back, given another k."""

import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dotmoe.errors import UserError
from dotmoe.export.format import TensorSpec
from dotmoe.files import require_free
from dotmoe.llama_cpp import most_active_experts
from dotmoe.progress import Update, no_update

try:
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants
except ImportError as error:
    raise UserError(
        "the gguf package is not installed, and GGUF files are written with it. "
        "Run pip install -e '.[gguf]' in the checkout."
    ) from error

_KINDS = {
    bool: GGUFValueType.BOOL,
    int: GGUFValueType.UINT32,
    float: GGUFValueType.FLOAT32,
    str: GGUFValueType.STRING,
    list: GGUFValueType.ARRAY,
}


def write_gguf(
    path: Path,
    arch: str,
    keys: dict[str, Any],
    specs: Sequence[TensorSpec],
    on_progress: Update = no_update,
) -> None:
    """Write a file; no more than one tensor is in memory.

    Args:
        path: File to write, in an existing folder.
        arch: `general.architecture`.
        keys: Metadata in full; whole numbers become uint32, in lists int32.
        specs: In the order in which to make them; names must differ, sizes be positive.
        on_progress: Told tensors.

    Raises:
        UserError: The disk has too little room, or a weight does not fit into its number format.
    """
    require_free(path.parent, sum(spec.num_bytes for spec in specs))
    with closing(GGUFWriter(path, arch)) as writer:
        for key, value in keys.items():
            writer.add_key_value(key, value, _KINDS[type(value)])
        for spec in specs:
            kind, dtype = GGMLQuantizationType[spec.stored], np.dtype(np.float32)
            writer.add_tensor_info(spec.name, spec.shape, dtype, spec.num_bytes, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, spec in enumerate(specs):
            writer.write_tensor_data(encoded(spec, spec.make()))
            on_progress(done + 1, len(specs), "tensors written")


def encoded(spec: TensorSpec, made: Tensor) -> np.ndarray:
    """A tensor as it is stored, in its number format."""
    values = made.float().contiguous().numpy()
    assert values.shape == spec.shape, f"{spec.name} is {values.shape}"
    if spec.stored == "F16" and (largest := np.abs(values).max()) > np.finfo(np.float16).max:
        raise UserError(
            f"{spec.name} cannot be stored as F16: {largest:g} does not fit into float16. "
            "Choose type bf16 or f32."
        )
    stored: np.ndarray = quants.quantize(values, GGMLQuantizationType[spec.stored])
    return stored


class GgufFile:
    """A file, mapped into memory."""

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        """Open a file.

        Raises:
            UserError: It is not there, or no GGUF.
        """
        if not path.is_file():
            raise UserError(f"{path} does not exist. Name a .gguf file.")
        try:
            self.reader = GGUFReader(path, "r+" if writable else "r")
        except (ValueError, KeyError, IndexError) as error:
            raise UserError(f"{path} is no whole GGUF file ({error}). Export it again.") from error
        except OSError as error:
            raise UserError(f"{path} cannot be opened ({error.strerror}).") from error
        self.path = path
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        """By name; `data` is as stored, mapped: writing to it changes a writable file."""
        self.keys = {key for key in self.reader.fields if not key.startswith("GGUF.")}
        self.arch = str(self.metadata("general.architecture"))

    def metadata(self, key: str) -> Any:
        """A plain value; None where the key is missing."""
        field = self.reader.fields.get(key)
        return None if field is None else field.contents()

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number of the architecture, by its key without the prefix.

        Raises:
            UserError: There is none, and no default.
        """
        found = self.metadata(f"{self.arch}.{key}")
        found = default if found is None else found
        if found is None:
            raise UserError(f"{self.path} is no decoder: it lacks {key}. Name a model's GGUF file.")
        return int(found)

    def tensor(self, name: str) -> Tensor:
        """Values, float32."""
        stored = self.tensors[name]
        values = quants.dequantize(stored.data, stored.tensor_type)
        return torch.from_numpy(np.array(values, dtype=np.float32))


def write_with_active_experts(path: Path, active_experts: int, out: Path) -> None:
    """Copy a file that dotmoe exported, with another k; it is then what an export with it writes.

    Raises:
        UserError: llama.cpp cannot run so many experts.
    """
    file = GgufFile(path)
    layers = file.size("block_count")
    moe_layers = layers - file.size("leading_dense_block_count", 0)
    most = most_active_experts(len(file.tensors), layers, moe_layers)
    if active_experts > most:
        raise UserError(
            f"active_experts is {active_experts}, but llama.cpp's graph has room for {most} in "
            f"{path}, and it aborts beyond. Choose {most} or fewer."
        )
    shutil.copyfile(path, out)
    copy = GgufFile(out, writable=True)
    for key in ("expert_used_count", "expert_weights_scale"):
        field = copy.reader.fields.get(f"{file.arch}.{key}")
        if field is not None:
            field.parts[field.data[0]][0] = active_experts
    for name, tensor in copy.tensors.items():
        if name.endswith(".ffn_down_exps.scale"):
            tensor.data[:] = active_experts
    copy.reader.data.flush()
