"""Files of token blocks: written piece by piece, mapped into memory when read."""

import hashlib
import json
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from safetensors import SafetensorError, safe_open
from torch import Tensor

from dotmoe.errors import UserError

FORMAT = "dotmoe-blocks-1"

_HEADER_BYTES = 512
_READ_BYTES = 1 << 20
_FLUSHED_TOKENS = 1 << 18


class BlockWriter:
    """Appends tokens to a safetensors file of blocks; memory does not grow with the file.

    Room for the header is kept free and filled last. The file has a temporary name until `finish`,
    and is removed if the `with` block ends before: a file of the right name is whole.
    """

    def __init__(self, path: Path, seq_len: int) -> None:
        """Begin a file.

        Args:
            path: What the file will be called; one that is there stays until `finish`.
            seq_len: Tokens of a block.

        Raises:
            UserError: No permission, or no such folder.
        """
        self.path = path
        self.seq_len = seq_len
        self.num_tokens = 0
        """Appended so far; the last of them may fill no block."""
        self._partial = path.with_name(path.name + ".partial")
        self._pending = array("i")
        self._digest = hashlib.sha256(f"{seq_len}:".encode())
        try:
            self._file = self._partial.open("wb", buffering=0)
        except OSError as error:
            raise self._failure(error) from error
        self._file.seek(_HEADER_BYTES)

    def __enter__(self) -> "BlockWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def append(self, tokens: Sequence[int] | Tensor) -> None:
        """Write token ids after those before, as int32.

        Raises:
            UserError: The disk is full.
        """
        if isinstance(tokens, Tensor):
            self._pending.frombytes(tokens.int().contiguous().numpy().tobytes())
        else:
            self._pending.extend(tokens)
        self.num_tokens += len(tokens)
        if len(self._pending) >= max(_FLUSHED_TOKENS, self.seq_len):
            self._flush()

    def finish(self) -> int:
        """Complete the file and give it its name; tokens that fill no block are dropped.

        Returns:
            Blocks in the file.

        Raises:
            UserError: The disk is full.
        """
        self._flush()
        num_blocks = self.num_tokens // self.seq_len
        content = {
            "__metadata__": {"format": FORMAT, "sha256": self._digest.hexdigest()},
            "tokens": {
                "dtype": "I32",
                "shape": [num_blocks, self.seq_len],
                "data_offsets": [0, 4 * num_blocks * self.seq_len],
            },
        }
        # A safetensors header is its length and JSON, which may end in blanks.
        header = json.dumps(content).encode().ljust(_HEADER_BYTES - 8)
        self._file.seek(0)
        self._write((_HEADER_BYTES - 8).to_bytes(8, "little") + header)
        try:
            os.fsync(self._file.fileno())
            self._file.close()
            self._partial.replace(self.path)
        except OSError as error:
            raise self._failure(error) from error
        return num_blocks

    def _flush(self) -> None:
        whole = len(self._pending) // self.seq_len * self.seq_len
        content = self._pending[:whole].tobytes()
        self._digest.update(content)
        self._write(content)
        del self._pending[:whole]

    def _write(self, content: bytes) -> None:
        view = memoryview(content)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> UserError:
        return UserError(
            f"{self.path} cannot be written after {4 * self.num_tokens:,} bytes "
            f"({error.strerror or error}). Make room or choose another folder."
        )


def mapped_blocks(path: Path) -> Tensor:
    """Tokens of a file of blocks, int32, [blocks, seq_len]: the system reads them when touched.

    The whole file is read once to compare its checksum, piece by piece.

    Raises:
        UserError: The file is missing, damaged or not one of blocks.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise UserError(f"{path} holds no token blocks. Delete it to tokenise again.")
            tokens_BT: Tensor = file.get_tensor("tokens")
        expected, found = metadata.get("sha256"), _sha256(path, tokens_BT)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path} cannot be read as token blocks ({error}). Delete it to tokenise again."
        ) from error
    if found != expected:
        raise UserError(f"{path} is damaged (checksum). Delete it to tokenise again.")
    return tokens_BT


def _sha256(path: Path, tokens_BT: Tensor) -> str:
    digest = hashlib.sha256(f"{tokens_BT.shape[1]}:".encode())
    with path.open("rb") as file:
        file.seek(-4 * tokens_BT.numel(), os.SEEK_END)
        while content := file.read(_READ_BYTES):
            digest.update(content)
    return digest.hexdigest()
