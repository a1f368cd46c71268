"""The header of a GGUF file, checked against the size of the file before it is read as a whole.

The gguf package believes what a header says: an array of 2^40 values in a file of a hundred bytes
keeps it busy for ever.
"""

import mmap
import struct
from pathlib import Path
from typing import Any

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q"}
_FORMATS |= {12: "d"}
"""Numbers by their type in the file, as `struct` names them."""
_LEAST_BYTES = {**{kind: struct.calcsize(form) for kind, form in _FORMATS.items()}, _STRING: 8}
_LEAST_BYTES[_ARRAY] = 12
"""Bytes that a value of each type takes at least."""
_LEAST_TENSOR_BYTES = 24
_MOST_DIMENSIONS, _DEEPEST = 4, 4


def require_sound_header(path: Path) -> None:
    """Raise `ValueError`, with the reason, for a header that states more than the file can hold.

    Takes time and memory in proportion to the header. What else is wrong is left to the reader.
    """
    with path.open("rb") as file:
        if path.stat().st_size < 24 or file.read(4) != _MAGIC:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Header(data).check()


class _Header:
    """Walks over the values of a header without keeping them."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = len(_MAGIC)
        is_little = struct.unpack_from("<I", data, self._at)[0] & 0xFFFF
        self._order = "<" if is_little else ">"

    def check(self) -> None:
        """Walk over all metadata and over the names and shapes of all tensors."""
        self._number("I")
        tensors, pairs = self._number("Q"), self._number("Q")
        self._require(tensors, _LEAST_TENSOR_BYTES, "tensors")
        self._require(pairs, 12, "metadata")
        for _ in range(pairs):
            key = self._string().decode(errors="replace")
            value = self._value(self._number("I"), key, 0)
            if key.endswith(".block_count") and isinstance(value, int) and value > tensors:
                raise ValueError(f"{key} is {value:,}, but there are {tensors:,} tensors")
        for _ in range(tensors):
            name = self._string().decode(errors="replace")
            dimensions = self._number("I")
            if dimensions > _MOST_DIMENSIONS:
                raise ValueError(f"{name} has {dimensions:,} dimensions")
            self._skip(8 * dimensions + 4 + 8, name)

    def _value(self, kind: int, key: str, depth: int) -> Any:
        """Pass over a value; the number, or None for text and arrays."""
        if kind in _FORMATS:
            return self._number(_FORMATS[kind])
        if kind == _STRING:
            self._string()
        elif kind == _ARRAY:
            self._array(key, depth)
        else:
            raise ValueError(f"{key} has the unknown type {kind}")
        return None

    def _array(self, key: str, depth: int) -> None:
        if depth == _DEEPEST:
            raise ValueError(f"{key} has arrays in arrays, {depth} deep")
        kind, length = self._number("I"), self._number("Q")
        if kind not in _LEAST_BYTES:
            raise ValueError(f"{key} has values of the unknown type {kind}")
        self._require(length, _LEAST_BYTES[kind], f"values of {key}")
        if kind in _FORMATS:
            self._skip(length * _LEAST_BYTES[kind], key)
            return
        for _ in range(length):
            self._value(kind, key, depth + 1)

    def _require(self, count: int, least_bytes: int, what: str) -> None:
        left = len(self._data) - self._at
        if count * least_bytes > left:
            raise ValueError(f"it states {count:,} {what}, and {left:,} bytes follow")

    def _number(self, form: str) -> int:
        size = struct.calcsize(form)
        start = self._at
        self._skip(size, "a number")
        value: int = struct.unpack_from(self._order + form, self._data, start)[0]
        return value

    def _string(self) -> bytes:
        length = self._number("Q")
        start = self._at
        self._skip(length, "a text")
        return self._data[start : self._at]

    def _skip(self, size: int, what: str) -> None:
        if size > len(self._data) - self._at:
            raise ValueError(f"{what} goes beyond the end of the file")
        self._at += size
