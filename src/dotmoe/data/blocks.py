"""TokenBlocks: packed text whose every batch is a pure function of the step; and its files."""

import hashlib
import json
import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dotmoe.errors import UserError

FORMAT = "dotmoe-blocks-1"
RUN_TOKENS = 64
"""Tokens in a row that two texts must share for one to count as part of the other."""

_HEADER_BYTES = 512
_TOKENS_AT_ONCE = 1 << 20
_BLOCKS_AT_ONCE = 256
_BASE = 0x9E3779B97F4A7C15 - (1 << 64)


@dataclass(eq=False)
class TokenBlocks:
    """Documents joined end to end and cut into blocks of equal length."""

    tokens_BT: Tensor
    """int32 token ids, [blocks, seq_len]."""

    def __post_init__(self) -> None:
        self.num_blocks, self.seq_len = self.tokens_BT.shape
        self.num_tokens = self.tokens_BT.numel()

    def batch(self, step: int, batch_size: int, seed: int, rank: int = 0, ranks: int = 1) -> Tensor:
        """A rank's blocks of one step: int64, [batch_size / ranks, seq_len].

        Blocks are dealt in seeded permutations, one an epoch, end to end: over any stretch of steps
        every block is seen equally often to within one, whether or not `batch_size` divides their
        number. The same arguments give the same blocks, so that the step is all there is to resume.
        The parts of all `ranks`, which divide `batch_size`, put one after the other are the batch
        of one rank.
        """
        share = batch_size // ranks
        first = step * batch_size + rank * share
        rows = []
        for position in range(first, first + share):
            epoch, place = divmod(position, self.num_blocks)
            rows.append(int(_permutation(self.num_blocks, seed, epoch)[place]))
        return self.tokens_BT[rows].long()

    def drawn(self, num_tokens: int) -> Tensor:
        """Blocks drawn evenly over the text that hold so many tokens: int64, [B, seq_len]."""
        rows = min(-(-num_tokens // self.seq_len), self.num_blocks)
        return self.tokens_BT[torch.arange(rows) * self.num_blocks // rows].long()

    def save(self, path: Path) -> None:
        """Write as one safetensors file, whole or not at all; memory does not grow with it.

        Raises:
            UserError: No room or no permission; a file that was there before is unharmed.
        """
        with block_writer(path, self.seq_len) as writer:
            for rows in torch.split(self.tokens_BT, max(1, _TOKENS_AT_ONCE // self.seq_len)):
                writer.append(rows.flatten())

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


@dataclass(slots=True)
class BlockWriter:
    """A file of blocks under way; see `block_writer`."""

    file: IO[bytes]
    num_tokens: int = 0
    """Appended so far; the last of them may fill no block, and are dropped in the end."""

    def append(self, tokens: Sequence[int] | Tensor) -> None:
        """Write token ids after those before, as int32."""
        self.num_tokens += len(tokens)
        if isinstance(tokens, Tensor):
            self.file.write(tokens.int().numpy().tobytes())
        else:
            self.file.write(array("i", tokens))


@contextmanager
def block_writer(path: Path, seq_len: int) -> Iterator[BlockWriter]:
    """Inside, tokens are appended to a safetensors file of blocks; memory does not grow with it.

    Room for the header is kept free and filled last. The file has a temporary name until the block
    ends without an exception: a file of the right name is whole, and one that is there stays until
    then.

    Raises:
        UserError: The disk is full, no permission, or no such folder.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb", buffering=4 * _TOKENS_AT_ONCE) as file:
            file.seek(_HEADER_BYTES)
            writer = BlockWriter(file)
            yield writer
            num_blocks = writer.num_tokens // seq_len
            file.truncate(_HEADER_BYTES + 4 * num_blocks * seq_len)
            file.seek(0)
            file.write(_header(num_blocks, seq_len))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror or error}). Make room or choose another "
            "folder."
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def split_off_tail(path: Path, tail: Path, num_tokens: int) -> None:
    """Move the blocks that hold the last `num_tokens` of a file, at most half of all, to another.

    Raises:
        UserError: There is only one block, so nothing can be kept apart; or no room.
    """
    blocks = TokenBlocks.load(path)
    if blocks.num_blocks < 2:
        raise UserError(
            f"the text gives 1 block of {blocks.seq_len} tokens, and one block or more must be "
            "kept out of training to measure on. Give more text, or lower seq_len."
        )
    head = blocks.num_blocks - min(-(-num_tokens // blocks.seq_len), blocks.num_blocks // 2)
    TokenBlocks(blocks.tokens_BT[head:]).save(tail)
    with path.open("r+b") as file:
        file.truncate(_HEADER_BYTES + 4 * head * blocks.seq_len)
        file.write(_header(head, blocks.seq_len))


def write_decontaminated(training: TokenBlocks, heldout: TokenBlocks, path: Path) -> int:
    """Write the training blocks that share no run of tokens with the held-out text.

    The held-out text is cut into runs of `RUN_TOKENS` tokens, and each run is looked for at every
    place of every training block. So a block that holds twice that many held-out tokens in a row is
    certain to be found; one that has only a licence header in common may be.

    `path` receives the blocks that are left, in order. A few are in memory at a time, and one
    number for each run of the held-out text.

    Returns:
        How many blocks are left out.

    Raises:
        UserError: No block is left, or there is no room; then there is no file.
    """
    run = min(RUN_TOKENS, training.seq_len, heldout.seq_len)
    parts = torch.split(heldout.tokens_BT, _BLOCKS_AT_ONCE)
    seen = torch.cat([_hashes(rows, run)[:, ::run].flatten() for rows in parts])
    with block_writer(path, training.seq_len) as writer:
        for rows in torch.split(training.tokens_BT, _BLOCKS_AT_ONCE):
            clean_B = ~torch.isin(_hashes(rows, run), seen).any(dim=1)
            writer.append(rows[clean_B].flatten())
        left_out = training.num_blocks - writer.num_tokens // training.seq_len
        if left_out == training.num_blocks:
            raise UserError(
                f"all {left_out} blocks of training text are part of the held-out text, on which "
                "the result would be measured. Give other data, or other eval_text."
            )
    return left_out


def _hashes(tokens_BT: Tensor, run: int) -> Tensor:
    """Hash of the `run` tokens from each place on, modulo 2^64: [B, T - run + 1]."""
    places = tokens_BT.shape[1] - run + 1
    result = torch.zeros(len(tokens_BT), places, dtype=torch.int64)
    for offset in range(run):
        result.mul_(_BASE).add_(tokens_BT[:, offset : offset + places]).add_(1)
    return result


def _header(num_blocks: int, seq_len: int) -> bytes:
    """A safetensors header: its length and JSON, which may end in blanks."""
    end = 4 * num_blocks * seq_len
    tokens = {"dtype": "I32", "shape": [num_blocks, seq_len], "data_offsets": [0, end]}
    text = json.dumps({"__metadata__": {"format": FORMAT}, "tokens": tokens}).encode()
    return (_HEADER_BYTES - 8).to_bytes(8, "little") + text.ljust(_HEADER_BYTES - 8)


@lru_cache(maxsize=4)
def _permutation(num_blocks: int, seed: int, epoch: int) -> Tensor:
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    return torch.randperm(num_blocks, generator=generator)
