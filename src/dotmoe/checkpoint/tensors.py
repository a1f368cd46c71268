"""A checkpoint's tensors, read one at a time from its files, exactly as they are stored."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dotmoe.checkpoint.folder import tensor_files
from dotmoe.errors import UserError, one_line
from dotmoe.models.dense import DenseModel
from dotmoe.models.family import TensorPart

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
"""Floating-point dtypes by their name in a safetensors header."""
EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"


class Tensors:
    """Named tensors of a safetensors checkpoint; nothing is read until it is asked for.

    Every family answers to the names of LLaMA's form, and to its own. A tied matrix answers to both
    its names, whichever of the two is stored. The tensor read last is kept, so that slices of one
    matrix taken in a row cost one read.
    """

    def __init__(
        self, folder: Path, *, tied: bool, part_of: Callable[[str], TensorPart] = TensorPart
    ) -> None:
        """List the tensors of `folder`.

        Raises:
            UserError: The folder has no safetensors weights, or a file of them is missing.
        """
        self.folder = folder
        self._part_of = part_of
        self._file_of = tensor_files(folder)
        stored = EMBEDDING if EMBEDDING in self._file_of else HEAD
        self._alias = {EMBEDDING: stored, HEAD: stored} if tied else {}
        self._last: tuple[str, Tensor] | None = None

    @classmethod
    def of(cls, dense: DenseModel) -> "Tensors":
        """The files of a dense model."""
        config, family = dense.config, dense.family
        return cls(
            dense.folder,
            tied=bool(config.tie_word_embeddings),
            part_of=lambda name: family.stored(config, name),
        )

    @property
    def names(self) -> set[str]:
        """Names as stored, without aliases."""
        return set(self._file_of)

    @property
    def dtype(self) -> torch.dtype:
        """Of the FFNs, which are most of a checkpoint."""
        return self.describe("model.layers.0.mlp.gate_proj.weight")[1]

    def stored_name(self, name: str) -> str:
        """Name in the files of the tensor that holds `name`.

        Raises:
            UserError: The checkpoint lacks it.
        """
        part = self._part_of(name).stored
        stored = self._alias.get(part, part)
        if stored not in self._file_of:
            raise UserError(
                f"{name} is missing from the safetensors files of {self.folder}. Fetch them again."
            )
        return stored

    def describe(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype, from the file's header alone."""
        stored = self.stored_name(name)
        with self._opened(stored) as file:
            view = file.get_slice(stored)
            shape, dtype = tuple(view.get_shape()), view.get_dtype()
        if dtype not in DTYPES:
            raise UserError(
                f"{name} in {self.folder} is stored as {dtype}, but weights must be one of "
                f"{', '.join(DTYPES)}. Choose a checkpoint that is not quantised."
            )
        rows = self._part_of(name).rows
        return shape if rows is None else (rows[1] - rows[0], *shape[1:]), DTYPES[dtype]

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU, in the dtype it is stored in."""
        stored, rows = self.stored_name(name), self._part_of(name).rows
        if self._last is None or self._last[0] != stored:
            self._last = None  # free the old tensor before the new one is read
            with self._opened(stored) as file:
                self._last = (stored, file.get_tensor(stored))
        whole = self._last[1]
        return whole if rows is None else whole[slice(*rows)]

    def read_all(self, stored: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Tensors by their names in the files, each of which is opened once."""
        for path, names in groupby(
            sorted(stored, key=self._file_of.__getitem__), self._file_of.__getitem__
        ):
            with safe_open(path, framework="pt") as file:
                for name in names:
                    yield name, file.get_tensor(name)

    def read_rows(self, name: str, rows: slice) -> Tensor:
        """Rows of a tensor that is stored under its own name or alias; no others are read."""
        stored = self.stored_name(name)
        with self._opened(stored) as file:
            part: Tensor = file.get_slice(stored)[rows]
        return part

    def forget(self) -> None:
        """Let go of the tensor read last."""
        self._last = None

    def require_shapes(self, model: nn.Module) -> None:
        """Refuse a checkpoint that lacks a parameter of a model, or has it in another shape."""
        for name, parameter in model.named_parameters():
            shape, _ = self.describe(name)
            if shape != tuple(parameter.shape):
                raise UserError(
                    f"{name} has shape {shape} in {self.folder}, but its config.json asks for "
                    f"{tuple(parameter.shape)}. Mend the config."
                )

    @contextmanager
    def _opened(self, stored: str) -> Iterator[Any]:
        """The file of a tensor, opened anew: what a mapped one has read counts as memory."""
        path = self._file_of[stored]
        try:
            with safe_open(path, framework="pt") as file:
                yield file
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{path} cannot be read ({one_line(error)}). Fetch the checkpoint again."
            ) from error
