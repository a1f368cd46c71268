"""TokenBlocks: packed text whose every batch is a pure function of the step."""

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dotmoe.data.packing import pack
from dotmoe.errors import UserError

_FORMAT = "dotmoe-blocks-1"


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

    def batch(self, step: int, batch_size: int, seed: int) -> Tensor:
        """Blocks of one step: int64, [batch_size, seq_len].

        Blocks are dealt in seeded permutations, one an epoch, end to end: over any stretch of steps
        every block is seen equally often to within one, whether or not `batch_size` divides their
        number. The same arguments give the same blocks, so that the step is all there is to resume.

        Args:
            step: 0 or more.
            batch_size: Blocks a step; may exceed the blocks there are.
            seed: Of the permutations.
        """
        positions = range(step * batch_size, (step + 1) * batch_size)
        rows = [
            int(_permutation(self.num_blocks, seed, position // self.num_blocks)[place])
            for position in positions
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

        Raises:
            UserError: No room or no permission; a file that was there before is unharmed.
        """
        partial = path.with_name(path.name + ".partial")
        metadata = {"format": _FORMAT, "sha256": self.sha256}
        try:
            save_file({"tokens": self.tokens_BT.contiguous()}, partial, metadata=metadata)
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.replace(path)
        except (OSError, SafetensorError) as error:
            if partial.is_file():
                partial.unlink()
            raise UserError(
                f"{path} ({4 * self.num_tokens:,} bytes) cannot be written: {error}. "
                "Make room or choose another folder."
            ) from error

    @classmethod
    def load(cls, path: Path) -> "TokenBlocks":
        """Read a file written by `save`.

        Raises:
            UserError: The file is missing, damaged or not one of blocks.
        """
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != _FORMAT:
                    raise UserError(f"{path} holds no token blocks. Delete it to tokenise again.")
                blocks = cls(file.get_tensor("tokens"))
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{path} cannot be read as token blocks ({error}). Delete it to tokenise again."
            ) from error
        if blocks.sha256 != metadata.get("sha256"):
            raise UserError(f"{path} is damaged (checksum). Delete it to tokenise again.")
        return blocks


def pack_blocks(
    documents: Iterable[str],
    tokenizer: Any,
    seq_len: int,
    max_tokens: int | None = None,
    on_progress: Callable[[int], None] | None = None,
    name: str = "the text",
    remedy: str = "Give more text, or lower seq_len.",
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
    if seq_len < 2:
        raise UserError(f"seq_len is {seq_len}, but a block needs a token to predict. Choose 2 up.")
    if max_tokens is not None and max_tokens < seq_len:
        raise UserError(
            f"{max_tokens} tokens of {name} are asked for, but one block of {seq_len} must be "
            f"filled. {remedy}"
        )
    tokens = pack(documents, tokenizer, max_tokens, on_progress).tokens
    num_blocks = tokens.numel() // seq_len
    if num_blocks == 0:
        raise UserError(
            f"{name} has {tokens.numel()} tokens, but one block of {seq_len} must be filled. "
            f"{remedy}"
        )
    return TokenBlocks(tokens[: num_blocks * seq_len].view(num_blocks, seq_len))


@lru_cache(maxsize=4)
def _permutation(num_blocks: int, seed: int, epoch: int) -> Tensor:
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    return torch.randperm(num_blocks, generator=generator)
