"""A GGUF file read back: metadata as plain values, tensors as float32."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from torch import Tensor

from dotmoe.errors import UserError
from dotmoe.gguf_export.weight_types import decode, tolerance


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

    @property
    def arch(self) -> str:
        """`general.architecture`."""
        return str(self.metadata("general.architecture"))

    @property
    def keys(self) -> set[str]:
        """Names of all metadata."""
        return {key for key in self.reader.fields if not key.startswith("GGUF.")}

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._tensors)

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
        for tensor in self._tensors.values():
            sizes[tensor.tensor_type.name] += int(tensor.n_bytes)
        return sizes.most_common(1)[0][0]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as in torch, rows last."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def kind(self, name: str) -> GGMLQuantizationType:
        """Number format."""
        return self._tensors[name].tensor_type

    def raw(self, name: str) -> np.ndarray:
        """A tensor as it is stored, mapped: writing to it changes a writable file."""
        return self._tensors[name].data

    def tensor(self, name: str) -> Tensor:
        """Values, float32."""
        return decode(self.raw(name), self.kind(name)).view(self.shape(name))

    def tolerance(self, name: str) -> Tensor:
        """How far each value may lie from the weight it stands for."""
        return tolerance(self.raw(name), self.kind(name)).view(self.shape(name))
