"""Number formats that decide what a conversion costs: stored, held in memory, and written."""

from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from dotmoe.checkpoint_folder import json_object, one_line
from dotmoe.errors import UserError
from dotmoe.models.family import Family

ExportDtype = Literal["source", "float32", "bfloat16"]

EXPORTED = (torch.float32, torch.bfloat16)
"""Dtypes whose range and spacing hold the scaled routers."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}


def stored_dtype(config: Any, family: Family, folder: Path) -> torch.dtype:
    """Dtype of the FFN weights: from the header of their file, else as the config says.

    Where neither says anything it is bfloat16. A checkpoint may be only partly there: what is
    missing is for loading to report.

    Raises:
        UserError: The file is there but damaged, or its weights are not plain numbers.
    """
    name = family.stored(config, family.ffn_tensor(0, "gate")).stored
    file = _file_of(name, folder)
    if file is None:
        dtype = getattr(config, "dtype", None) or torch.bfloat16
        return getattr(torch, dtype) if isinstance(dtype, str) else dtype
    try:
        with safe_open(file, framework="pt") as tensors:
            found = tensors.get_slice(name).get_dtype()
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read ({one_line(error)}). Get it again.") from error
    if found not in _DTYPES:
        raise UserError(
            f"{name} in {file} is stored as {found}, but weights must be one of "
            f"{', '.join(_DTYPES)}. Choose a checkpoint that is not quantised."
        )
    return _DTYPES[found]


def _file_of(name: str, folder: Path) -> Path | None:
    """The safetensors file that should hold a tensor, if it is there."""
    file, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not file.is_file() and index.is_file():
        shard_of = json_object(index).get("weight_map")
        shard = shard_of.get(name) if isinstance(shard_of, dict) else None
        file = folder / str(shard)
    return file if file.is_file() else None


def written_dtype(stored: torch.dtype, export_dtype: ExportDtype) -> torch.dtype:
    """Dtype of the exported weights; bfloat16 where the stored one needs another choice first."""
    if export_dtype != "source":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[export_dtype]
    return stored if stored in EXPORTED else torch.bfloat16


def bytes_held(asked: Literal[2, 4] | None, device_type: str, stored: torch.dtype) -> Literal[2, 4]:
    """Bytes of a dense weight while working, as `--dtype auto` has it unless asked otherwise.

    Example:
        >>> [bytes_held(None, device, torch.bfloat16) for device in ("cpu", "cuda")]
        [4, 2]
    """
    if asked is not None:
        return asked
    return 4 if device_type == "cpu" or stored.itemsize > 2 else 2


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16`, not `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")
