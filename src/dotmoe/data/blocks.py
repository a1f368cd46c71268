"""TokenBlocks: packed text whose every batch is a pure function of the step; and its files."""

import hashlib
import json
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dotmoe.errors import UserError

FORMAT = "dotmoe-blocks-1"

_HEADER_BYTES = 512
_FLUSHED_TOKENS = 1 << 18
_SAVED_TOKENS = 1 << 20


@dataclass(frozen=True, eq=False)
class TokenBlocks:
    """Documents joined end to end and cut into blocks of equal length."""

    tokens_BT: Tensor
    """int32 token ids, [blocks, seq_len]."""

    @property
    def num_blocks(self) -> int:
        """Blocks (rows)."""
        return self.tokens_BT.shape[0]

    @property
    def seq_len(self) -> int:
        """Tokens of one block."""
        return self.tokens_BT.shape[1]

    @property
    def num_tokens(self) -> int:
        """Tokens of all blocks."""
        return self.tokens_BT.numel()

    def batch(self, step: int, batch_size: int, seed: int, rank: int = 0, ranks: int = 1) -> Tensor:
        """A rank's blocks of one step: int64, [batch_size / ranks, seq_len].

        Blocks are dealt in seeded permutations, one an epoch, end to end: over any stretch of steps
        every block is seen equally often to within one, whether or not `batch_size` divides their
        number. The same arguments give the same blocks, so that the step is all there is to resume.
        The ranks' parts, put one after the other, are the batch of one rank.

        Args:
            step: 0 or more.
            batch_size: Blocks a step of all ranks together; may exceed the blocks there are.
            seed: Of the permutations.
            rank: 0 to `ranks` - 1.
            ranks: How many share the batch; divides `batch_size`.
        """
        share = batch_size // ranks
        first = step * batch_size + rank * share
        rows = [
            int(_permutation(self.num_blocks, seed, position // self.num_blocks)[place])
            for position in range(first, first + share)
            for place in [position % self.num_blocks]
        ]
        return self.tokens_BT[rows].long()

    def without_tail(self, num_tokens: int) -> tuple["TokenBlocks", "TokenBlocks"]:
        """Split off the last blocks, `num_tokens` of them rounded up to whole blocks.

        Returns:
            What is left, and the tail. At most half of the blocks go to the tail.

        Raises:
            UserError: There is only one block, so nothing can be kept apart.
        """
        if self.num_blocks < 2:
            raise UserError(
                f"the text gives 1 block of {self.seq_len} tokens, and one block or more must be "
                "kept out of training to measure on. Give more text, or lower seq_len."
            )
        tail = min(-(-num_tokens // self.seq_len), self.num_blocks // 2)
        head = self.num_blocks - tail
        return TokenBlocks(self.tokens_BT[:head]), TokenBlocks(self.tokens_BT[head:])

    def save(self, path: Path) -> None:
        """Write as one safetensors file, under a temporary name that is then renamed.

        Memory does not grow with the number of blocks.

        Raises:
            UserError: No room or no permission; a file that was there before is unharmed.
        """
        with BlockWriter(path, self.seq_len) as writer:
            for rows in torch.split(self.tokens_BT, max(1, _SAVED_TOKENS // self.seq_len)):
                writer.append(rows.flatten())
            writer.finish()

    @classmethod
    def load(cls, path: Path) -> "TokenBlocks":
        """Map a file of blocks into memory: the system reads what is looked at.

        Raises:
            UserError: The file is missing, damaged or not one of blocks.
        """
        try:
            with safe_open(path, framework="pt") as file:
                if (file.metadata() or {}).get("format") != FORMAT:
                    raise UserError(f"{path} holds no token blocks. Delete it to tokenise again.")
                return cls(file.get_tensor("tokens"))
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{path} cannot be read as token blocks ({error}). Delete it to tokenise again."
            ) from error


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
        self._file.seek(0)
        self._write(_header(num_blocks, self.seq_len))
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


def split_off_tail(path: Path, tail: Path, num_tokens: int) -> None:
    """Move the last blocks of a file into another one, see `TokenBlocks.without_tail`.

    Raises:
        UserError: There is only one block, or no room.
    """
    head, last = TokenBlocks.load(path).without_tail(num_tokens)
    last.save(tail)
    with path.open("r+b") as file:
        file.truncate(_HEADER_BYTES + 4 * head.num_tokens)
        file.write(_header(head.num_blocks, head.seq_len))


def _header(num_blocks: int, seq_len: int) -> bytes:
    """A safetensors header: its length and JSON, which may end in blanks."""
    content = {
        "__metadata__": {"format": FORMAT},
        "tokens": {
            "dtype": "I32",
            "shape": [num_blocks, seq_len],
            "data_offsets": [0, 4 * num_blocks * seq_len],
        },
    }
    text = json.dumps(content).encode().ljust(_HEADER_BYTES - 8)
    return (_HEADER_BYTES - 8).to_bytes(8, "little") + text


@lru_cache(maxsize=4)
def _permutation(num_blocks: int, seed: int, epoch: int) -> Tensor:
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    return torch.randperm(num_blocks, generator=generator)
