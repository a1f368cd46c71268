"""GGUF, the container of llama.cpp: files written tensor by tensor, and read back."""

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dotmoe.errors import UserError
from dotmoe.export.format import TensorSpec
from dotmoe.files import DISK_FULL, full_disk, require_free

try:
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants
except ImportError as error:
    raise UserError(
        "the gguf package is not installed, and GGUF files are written with it. "
        "Run pip install 'dotmoe[gguf]'."
    ) from error

_TYPES = {
    bool: GGUFValueType.BOOL,
    int: GGUFValueType.UINT32,
    float: GGUFValueType.FLOAT32,
    str: GGUFValueType.STRING,
}
_FLOAT16_MAX = float(torch.finfo(torch.float16).max)


def write_gguf(path: Path, arch: str, keys: dict[str, Any], specs: Sequence[TensorSpec]) -> None:
    """Write a file; no more than one tensor is in memory.

    Args:
        path: File to write, in an existing folder.
        arch: `general.architecture`.
        keys: Metadata in full; whole numbers become uint32, in lists int32.
        specs: In the order in which to make them; names must differ, sizes be positive.

    Raises:
        UserError: The disk has too little room, or a weight does not fit into its number format.
    """
    total = sum(spec.num_bytes for spec in specs)
    require_free(path.parent, total)
    writer = GGUFWriter(path, arch)
    for key, value in keys.items():
        if isinstance(value, list):
            item = GGUFValueType.INT32 if isinstance(value[0], int) else _TYPES[type(value[0])]
            writer.add_key_value(key, value, GGUFValueType.ARRAY, sub_type=item)
        else:
            writer.add_key_value(key, value, _TYPES[type(value)])
    for spec in specs:
        assert spec.num_bytes > 0, f"{spec.name} is empty"
        kind = GGMLQuantizationType[spec.stored]
        writer.add_tensor_info(
            spec.name, spec.shape, np.dtype(np.float32), spec.num_bytes, raw_dtype=kind
        )
    try:
        with closing(writer):
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for spec in specs:
                writer.write_tensor_data(encoded(spec, spec.make()))
    except OSError as error:
        if error.errno in DISK_FULL:
            raise full_disk(path.parent, error, total) from error
        raise


def encoded(spec: TensorSpec, made: Tensor) -> np.ndarray:
    """A tensor as it is stored, in its number format."""
    tensor = made.float().contiguous()
    assert tuple(tensor.shape) == spec.shape, f"{spec.name} is {tuple(tensor.shape)}"
    if spec.stored == "F16" and float(tensor.abs().max()) > _FLOAT16_MAX:
        raise UserError(
            f"{spec.name} cannot be stored as F16: {float(tensor.abs().max()):g} does not fit into "
            "float16. Choose type bf16 or f32."
        )
    stored: np.ndarray = quants.quantize(tensor.numpy(), GGMLQuantizationType[spec.stored])
    return stored


class GgufFile:
    """Maps a file; tensors are decoded when they are asked for."""

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        """Open a file.

        Raises:
            UserError: It is not there, or no GGUF.
        """
        self.path = path
        if not path.is_file():
            raise UserError(f"{path} does not exist. Name a .gguf file.")
        try:
            self.reader = GGUFReader(path, "r+" if writable else "r")
        except (ValueError, KeyError, IndexError) as error:
            raise UserError(f"{path} is no whole GGUF file ({error}). Export it again.") from error
        except OSError as error:
            raise UserError(f"{path} cannot be opened ({error.strerror}).") from error
        self._tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        self.arch = str(self.metadata("general.architecture"))
        self.keys = {key for key in self.reader.fields if not key.startswith("GGUF.")}
        self.names = set(self._tensors)

    def metadata(self, key: str) -> Any:
        """A plain value; None where the key is missing."""
        found = self.reader.fields.get(key)
        return None if found is None else found.contents()

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

    @property
    def most_bytes_in(self) -> str:
        """Number format of most bytes, such as `Q8_0`."""
        sizes: Counter[str] = Counter()
        for name, tensor in self._tensors.items():
            sizes[self.stored(name)] += int(tensor.n_bytes)
        return sizes.most_common(1)[0][0]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as in torch, rows last."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def stored(self, name: str) -> str:
        """Number format."""
        return str(self._tensors[name].tensor_type.name)

    def raw(self, name: str) -> np.ndarray:
        """A tensor as it is stored, mapped: writing to it changes a writable file."""
        data: np.ndarray = self._tensors[name].data
        return data

    def tensor(self, name: str) -> Tensor:
        """Values, float32."""
        values = quants.dequantize(self.raw(name), self._tensors[name].tensor_type)
        return torch.from_numpy(np.array(values, dtype=np.float32)).view(self.shape(name))
