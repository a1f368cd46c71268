"""A GGUF file written tensor by tensor, and within a tensor rows by rows."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFValueType, GGUFWriter

from dotmoe.errors import UserError
from dotmoe.files import DISK_FULL, full_disk, require_free
from dotmoe.gguf_export.tensor_plan import GgufTensor
from dotmoe.gguf_export.weight_types import FILE_TYPES, WeightType, encode

_SCALARS = {
    bool: GGUFValueType.BOOL,
    int: GGUFValueType.UINT32,
    float: GGUFValueType.FLOAT32,
    str: GGUFValueType.STRING,
}
_ITEMS = {int: GGUFValueType.INT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}

_QUANTISATION_VERSION = 2


def file_metadata(
    name: str, arch: str, keys: dict[str, Any], weights: WeightType
) -> dict[str, Any]:
    """All keys of a file but `general.architecture`, in full.

    Args:
        name: What to call the model.
        arch: Prefix of `keys`.
        keys: Keys of the architecture.
        weights: Number format of the matrices.
    """
    return {
        "general.type": "model",
        "general.name": name,
        "general.file_type": int(FILE_TYPES[weights]),
        "general.quantization_version": _QUANTISATION_VERSION,
        **{f"{arch}.{key}": value for key, value in keys.items()},
    }


def write_gguf(
    path: Path,
    arch: str,
    metadata: dict[str, Any],
    tensors: Sequence[GgufTensor],
    weights: WeightType,
) -> int:
    """Write a file.

    Args:
        path: File to write, in an existing folder.
        arch: `general.architecture`.
        metadata: Keys in full; whole numbers become uint32, lists int32, float32 or texts.
        tensors: In the order in which to make them; names must differ.
        weights: Number format of the matrices.

    Returns:
        Bytes of all tensors.

    Raises:
        UserError: The disk has too little room, or a weight does not fit into its format.
    """
    total = sum(tensor.num_bytes(weights) for tensor in tensors)
    require_free(path.parent, total)
    writer = GGUFWriter(path, arch)
    for key, value in metadata.items():
        _add(writer, key, value)
    for tensor in tensors:
        assert 0 not in tensor.shape, f"{tensor.name} is empty"
        writer.add_tensor_info(
            tensor.name,
            tensor.shape,
            np.dtype(np.float32),
            tensor.num_bytes(weights),
            raw_dtype=tensor.kind(weights),
        )
    try:
        with closing(writer):
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor in tensors:
                _write_rows(writer, tensor, weights)
    except OSError as error:
        if error.errno in DISK_FULL:
            raise full_disk(path.parent, error, total) from error
        raise
    return total


def _write_rows(writer: GGUFWriter, tensor: GgufTensor, weights: WeightType) -> None:
    assert writer.fout is not None
    (file,) = writer.fout
    kind, length = tensor.kind(weights), tensor.shape[-1]
    writer.write_padding(file, file.tell())
    start = file.tell()
    for rows in tensor.rows():
        assert rows.shape[-1] == length, f"{tensor.name} has rows of {rows.shape[-1]}"
        try:
            file.write(encode(rows.float(), kind))
        except OverflowError as error:
            raise UserError(
                f"{tensor.name} cannot be stored as {kind.name}: {error}. Choose type bf16 or f32."
            ) from error
    written = file.tell() - start
    assert written == tensor.num_bytes(weights), f"{tensor.name} has {written} bytes"
    writer.write_padding(file, file.tell())


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_key_value(key, value, GGUFValueType.ARRAY, sub_type=_ITEMS[type(value[0])])
    else:
        writer.add_key_value(key, value, _SCALARS[type(value)])
