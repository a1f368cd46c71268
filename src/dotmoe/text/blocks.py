"""Token ids cut into blocks: `TokenBlocks` and their files.

Every batch of blocks is a pure function of step, batch size and seed.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dotmoe.common.errors import UserError
from dotmoe.common.files import DamagedError, Values, read_json, save_tensors, write_json
from dotmoe.common.numbers import ceil_div

_HEADER_BYTES, _BUFFER_BYTES = 512, 1 << 22
_KEEP_SECONDS = 10


class TokenBlocks:
    """Token ids in blocks of equal length.

    A block of text is cut from documents that are joined end to end; a block of answers holds whole
    chats (see `whole_chats`).
    """

    def __init__(self, tokens_BT: Tensor, is_answer_BT: Tensor | None = None) -> None:
        """Wrap int32 token ids, [blocks, seq_len].

        `is_answer_BT`, bool, [blocks, seq_len]: whether a model wrote or would write each token;
        only these count in the loss of a training. None: all do.
        """
        self.tokens_BT = tokens_BT
        self.num_tokens = tokens_BT.numel()
        self.is_answer_BT = is_answer_BT
        self.num_blocks, self.seq_len = tokens_BT.shape

    def batch(self, step: int, batch_size: int, seed: int, rank: int = 0, ranks: int = 1) -> Tensor:
        """The blocks of one step for one rank: int64, [batch_size / ranks, seq_len].

        Blocks come in seeded permutations, a new one for each epoch. The same arguments give the
        same blocks, so a resumed run needs only the step number. `ranks` must divide `batch_size`;
        the parts of all ranks, joined in order, are the batch of a run on one rank.
        """
        return self.tokens_BT[self._rows_of(step, batch_size, seed, rank, ranks)].long()

    def answers_in_batch(
        self, step: int, batch_size: int, seed: int, rank: int = 0, ranks: int = 1
    ) -> Tensor | None:
        """`is_answer_BT` of the blocks that `batch` gives for the same arguments."""
        if self.is_answer_BT is None:
            return None
        return self.is_answer_BT[self._rows_of(step, batch_size, seed, rank, ranks)]

    def _rows_of(self, step: int, batch_size: int, seed: int, rank: int, ranks: int) -> list[int]:
        share = batch_size // ranks
        first = step * batch_size + rank * share
        rows = list[int]()
        for position in range(first, first + share):
            epoch, place = divmod(position, self.num_blocks)
            rows.append(int(_permutation(self.num_blocks, seed, epoch)[place]))
        return rows

    def drawn(self, num_tokens: int) -> Tensor:
        """Blocks at equal distances in the text, enough for `num_tokens`: int64, [B, seq_len]."""
        return self.tokens_BT[self._drawn_rows(num_tokens)].long()

    def num_drawn(self, num_tokens: int) -> int:
        """Tokens of the blocks that `drawn` gives for so many: whole blocks, at most all."""
        return min(ceil_div(num_tokens, self.seq_len), self.num_blocks) * self.seq_len

    def _drawn_rows(self, num_tokens: int) -> Tensor:
        rows = self.num_drawn(num_tokens) // self.seq_len
        return torch.arange(rows) * self.num_blocks // rows

    def select(self, rows: Tensor | slice) -> "TokenBlocks":
        """Some of the blocks: by a slice, their numbers, or a mask of bool."""
        is_answer_BT = None if self.is_answer_BT is None else self.is_answer_BT[rows]
        return TokenBlocks(self.tokens_BT[rows], is_answer_BT)

    def save(self, path: Path) -> None:
        """Write as one safetensors file; see `block_writer`."""
        if self.is_answer_BT is not None:
            tensors = {"tokens": self.tokens_BT, "is_answer": self.is_answer_BT}
            save_tensors({name: each.contiguous() for name, each in tensors.items()}, path)
            return
        with block_writer(path, self.seq_len) as writer:
            writer.append(self.tokens_BT.flatten())

    @classmethod
    def load(cls, path: Path) -> "TokenBlocks":
        """Map a file into memory; raises `UserError` if it is missing, damaged or another kind."""
        try:
            with safe_open(path, framework="pt") as file:
                is_marked = "is_answer" in file.keys()  # noqa: SIM118, it is no mapping
                is_answer_BT = file.get_tensor("is_answer") if is_marked else None
                return cls(file.get_tensor("tokens"), is_answer_BT)
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{path} cannot be read as token blocks ({error}). Delete it to tokenise again."
            ) from error


@dataclass(slots=True)
class BlockWriter:
    """A file of blocks that is being written; see `block_writer`."""

    file: IO[bytes]
    state_file: Path
    job: Values | None
    """What is written, as JSON values: a later writer of the same goes on. None: none goes on."""
    state: Values
    """What `keep` was given last, before this process began to write; empty at a start."""
    num_tokens: int = 0
    """Number of tokens appended so far; those after the last full block are dropped at the end."""
    kept: float = field(default_factory=time.monotonic)

    def append(self, tokens: Sequence[int] | Tensor) -> None:
        """Append token ids to the file."""
        self.num_tokens += len(tokens)
        self.file.write(torch.as_tensor(tokens, dtype=torch.int32).numpy().data)

    def keep(self, state: Mapping[str, Any]) -> None:
        """Every 10 s, make what is appended survive the end of this process."""
        if time.monotonic() - self.kept >= _KEEP_SECONDS:
            self.file.flush()
            os.fsync(self.file.fileno())
            whole = {"job": self.job, "state": state, "tokens": self.num_tokens}
            write_json(self.state_file, whole)
            self.kept = time.monotonic()


@contextmanager
def block_writer(path: Path, seq_len: int, job: Values | None = None) -> Iterator[BlockWriter]:
    """Within this context, append tokens to a safetensors file of blocks, in constant memory.

    The write is atomic: the file is in the folder `PATH.parts` until the context ends without an
    exception, and an older file of the final name is kept until then. What the writer was told to
    `keep` stays, also after a kill, and a writer with the same `job` goes on from there. Raises
    `UserError` if the disk is full, permission is missing, or the folder does not exist.
    """
    parts = path.with_name(path.name + ".parts")
    partial, state_file = parts / "tokens", parts / "state.json"
    try:
        parts.mkdir(exist_ok=True)
        with partial.open("ab", buffering=_BUFFER_BYTES) as file:
            writer = BlockWriter(file, state_file, json.loads(json.dumps(job)), {})
            _go_on(writer)
            yield writer
        with partial.open("r+b") as file:  # the header, which states the length, is written last
            num_blocks = writer.num_tokens // seq_len
            end = 4 * num_blocks * seq_len
            file.truncate(_HEADER_BYTES + end)
            # A safetensors header is its length, then JSON that may be padded with blanks.
            tokens = {"dtype": "I32", "shape": [num_blocks, seq_len], "data_offsets": [0, end]}
            header = json.dumps({"tokens": tokens}).encode()
            size = _HEADER_BYTES - 8
            file.write(size.to_bytes(8, "little") + header.ljust(size))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        state_file.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror or error}). Make room or choose another "
            "folder."
        ) from error
    finally:
        if not state_file.exists():
            shutil.rmtree(parts, ignore_errors=True)


def _go_on(writer: BlockWriter) -> None:
    """Bring the writer to where one with the same job was told to `keep` its tokens."""
    with suppress(DamagedError):
        kept = read_json(writer.state_file)
        size = _HEADER_BYTES + 4 * kept["tokens"]
        is_same_job = writer.job is not None and kept["job"] == writer.job
        if is_same_job and writer.file.tell() >= size:
            writer.file.truncate(size)
            writer.state = kept["state"]
            writer.num_tokens = kept["tokens"]
            return
    writer.state_file.unlink(missing_ok=True)
    writer.file.truncate(0)
    writer.file.write(bytes(_HEADER_BYTES))


def split_off_tail(path: Path, tail: Path, num_tokens: int) -> None:
    """Move the last `num_tokens` of a file, as whole blocks but at most half of all, to another.

    Raises `UserError` if there is only one block, so none can be held out, or if the disk is full.
    """
    blocks = TokenBlocks.load(path)
    if blocks.num_blocks < 2:
        raise UserError(
            f"the text gives 1 block of {blocks.seq_len} tokens, but at least one more is "
            "needed as held-out text. Give more text, or lower seq_len."
        )
    head = blocks.num_blocks - min(ceil_div(num_tokens, blocks.seq_len), blocks.num_blocks // 2)
    blocks.select(slice(head, None)).save(tail)
    blocks.select(slice(head)).save(path)


@lru_cache(maxsize=4)
def _permutation(num_blocks: int, seed: int, epoch: int) -> Tensor:
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    return torch.randperm(num_blocks, generator=generator)
