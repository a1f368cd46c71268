"""TokenBlocks: packed text whose every batch is a pure function of the step."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dotmoe.data.block_file import BlockWriter, mapped_blocks
from dotmoe.data.packing import pack
from dotmoe.errors import UserError

MORE_TEXT = "Give more text, or lower seq_len."
"""What to do about a text that fills no block."""

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

    @cached_property
    def sha256(self) -> str:
        """Fingerprint of block length and tokens."""
        digest = hashlib.sha256(f"{self.seq_len}:".encode())
        digest.update(self.tokens_BT.contiguous().numpy().astype("<i4", copy=False).data)
        return digest.hexdigest()

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
        """Map a file written by `save` or `BlockWriter` into memory, after comparing its checksum.

        What is not looked at takes no memory, and what is can be dropped again by the system.

        Raises:
            UserError: The file is missing, damaged or not one of blocks.
        """
        return cls(mapped_blocks(path))


def split_off_tail(path: Path, tail: Path, num_tokens: int) -> None:
    """Move the last blocks of a file into another one, see `TokenBlocks.without_tail`.

    Raises:
        UserError: There is only one block, or no room.
    """
    whole = path.with_name("whole.safetensors")
    path.rename(whole)
    for part, file in zip(
        TokenBlocks.load(whole).without_tail(num_tokens), (path, tail), strict=True
    ):
        part.save(file)
    whole.unlink()


def pack_blocks(
    documents: Iterable[str],
    tokenizer: Any,
    seq_len: int,
    max_tokens: int | None = None,
    on_progress: Callable[[int], None] | None = None,
    name: str = "the text",
    remedy: str = MORE_TEXT,
) -> TokenBlocks:
    """Tokenise, join (see `pack`) and cut into blocks; the tail that fills no block is dropped.

    Args:
        documents: Texts, as `documents` streams them.
        tokenizer: A Hugging Face tokenizer.
        seq_len: Tokens of a block, 2 or more.
        max_tokens: Tokenise no more than this.
        on_progress: Told the number of tokens so far.
        name: What to call the text in an error.
        remedy: What to do where there is too little of it.

    Raises:
        UserError: The text, or `max_tokens`, is shorter than one block.
    """
    require_room_for_a_block(seq_len, max_tokens, name, remedy)
    tokens = pack(documents, tokenizer, max_tokens, on_progress).tokens
    num_blocks = tokens.numel() // seq_len
    require_a_block(tokens.numel(), seq_len, name, remedy)
    return TokenBlocks(tokens[: num_blocks * seq_len].view(num_blocks, seq_len))


def require_room_for_a_block(
    seq_len: int, max_tokens: int | None, name: str, remedy: str = MORE_TEXT
) -> None:
    """Refuse a block length, or a number of tokens, that can give no block.

    Raises:
        UserError: `seq_len` is below 2, or above `max_tokens`.
    """
    if seq_len < 2:
        raise UserError(f"seq_len is {seq_len}, but a block needs a token to predict. Choose 2 up.")
    if max_tokens is not None and max_tokens < seq_len:
        raise UserError(
            f"{max_tokens} tokens of {name} are asked for, but one block of {seq_len} must be "
            f"filled. {remedy}"
        )


def require_a_block(num_tokens: int, seq_len: int, name: str, remedy: str = MORE_TEXT) -> None:
    """Refuse a text that is too short.

    Raises:
        UserError: `num_tokens` is below `seq_len`.
    """
    if num_tokens < seq_len:
        raise UserError(
            f"{name} has {num_tokens} tokens, but one block of {seq_len} must be filled. {remedy}"
        )


@lru_cache(maxsize=4)
def _permutation(num_blocks: int, seed: int, epoch: int) -> Tensor:
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    return torch.randperm(num_blocks, generator=generator)
