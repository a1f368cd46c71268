"""Token ids cut into blocks: `TokenBlocks`, their files, and what two texts share.

Every batch of blocks is a pure function of step, batch size and seed.
"""

import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dotmoe.common.errors import UserError
from dotmoe.common.files import DamagedError, Values, read_json, save_tensors, write_json
from dotmoe.common.numbers import ceil_div

RUN_TOKENS = 64
"""Length, in tokens, of the runs of held-out text that no training block may contain."""


_FEWEST_TOKENS = 8
"""Shorter documents are common words."""
_HEADER_BYTES, _BUFFER_BYTES = 512, 1 << 22
_BLOCKS_AT_ONCE = 256
_BASE, _INVERSE = 0x9E3779B97F4A7C15 - (1 << 64), -0xE217C1E66C88CC3
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

    def _drawn_rows(self, num_tokens: int) -> Tensor:
        rows = min(ceil_div(num_tokens, self.seq_len), self.num_blocks)
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


def write_decontaminated(
    training: TokenBlocks, heldout: TokenBlocks, path: Path, separator: int | None = None
) -> int:
    """Write the training blocks that share no run of tokens with the held-out text, in order.

    The held-out text is cut into runs of `RUN_TOKENS` tokens, and each run is searched for at every
    position of every training block, so a block with twice that many held-out tokens in a row is
    always found. A block with a whole shorter document of the held-out text is left out, too.
    Memory does not grow with the training text. `separator` is the token between documents.

    Returns the number of blocks left out. Raises `UserError` if none remains, or the disk is full.
    """
    run, seen = _runs(training, heldout)
    parts = torch.split(training.tokens_BT, _BLOCKS_AT_ONCE)
    is_kept_B = torch.cat([~torch.isin(_hashes(rows, run), seen).any(dim=1) for rows in parts])
    short = _own_documents(heldout, separator)
    if short:
        for number, row_T in enumerate(training.tokens_BT):
            if not short.keys().isdisjoint(_short_documents(row_T, separator)):
                is_kept_B[number] = False
    left_out = int((~is_kept_B).sum())
    if left_out == training.num_blocks:
        raise UserError(
            f"all {left_out} blocks of training text are part of the held-out text that "
            "results are measured on. Give other data, or another eval_text."
        )
    if training.is_answer_BT is not None:
        training.select(is_kept_B).save(path)
        return left_out
    with block_writer(path, training.seq_len) as writer:
        for rows, is_kept in zip(parts, torch.split(is_kept_B, _BLOCKS_AT_ONCE), strict=True):
            writer.append(rows[is_kept].flatten())
    return left_out


def overlap(training: TokenBlocks, heldout: TokenBlocks, separator: int | None = None) -> float:
    """Share of the held-out text that the training text contains.

    It is found by runs of `RUN_TOKENS` tokens, or, of documents that are too short for them, by
    whole documents between two tokens `separator`: the larger share of the two.
    """
    of_documents = _overlap_of_documents(training, heldout, separator)
    return max(of_documents, _overlap_of_runs(training, heldout))


def _overlap_of_documents(
    training: TokenBlocks, heldout: TokenBlocks, separator: int | None
) -> float:
    """Share of the held-out text that is short documents of the training text, by tokens."""
    short = _own_documents(heldout, separator)
    if not short:
        return 0.0
    seen = set[bytes]()
    for rows in torch.split(training.tokens_BT, _BLOCKS_AT_ONCE):
        seen |= short.keys() & set(_short_documents(rows.flatten(), separator))
    return sum(short[each] for each in seen) / heldout.num_tokens


def _own_documents(heldout: TokenBlocks, separator: int | None) -> dict[bytes, int]:
    """Short documents of the held-out text with their lengths, without what it repeats itself.

    The beginning of every chat is repeated where the separator ends a turn as well.
    """
    found = Counter(_short_documents(heldout.tokens_BT.flatten(), separator))
    size = heldout.tokens_BT.element_size()
    return {each: len(each) // size for each, times in found.items() if times == 1}


def _short_documents(text_T: Tensor, separator: int | None) -> Iterator[bytes]:
    """The ids, as bytes, of whole documents that may hold no run of `RUN_TOKENS` tokens."""
    if separator is None:
        return
    places = (text_T == separator).nonzero()[:, 0].tolist()
    for before, after in pairwise(places):
        if _FEWEST_TOKENS < after - before < 2 * RUN_TOKENS:
            yield text_T[before + 1 : after].numpy().tobytes()


def _overlap_of_runs(training: TokenBlocks, heldout: TokenBlocks) -> float:
    """Share of the held-out text's runs of `RUN_TOKENS` tokens that the training text contains."""
    run, every = _runs(training, heldout)
    return int(_has_runs(training, every, run).sum()) / len(every)


def contained(training: TokenBlocks, ends: Sequence[Sequence[int]]) -> Tensor:
    """Whether the training text has the last tokens of each sequence in a row, bool [N].

    These are `RUN_TOKENS` tokens, or the whole of a shorter sequence.
    """
    runs = [list(end[-RUN_TOKENS:]) for end in ends]
    found = torch.zeros(len(runs), dtype=torch.bool)
    for length in {len(run) for run in runs}:
        places = [place for place, run in enumerate(runs) if len(run) == length]
        hashes = _hashes(torch.tensor([runs[place] for place in places]), length)[:, 0]
        found[places] = _has_runs(training, hashes, length)
    return found


def _has_runs(training: TokenBlocks, hashes: Tensor, run: int) -> Tensor:
    """Whether the training text has runs of `run` tokens with these hashes, for each of them."""
    found = torch.zeros(len(hashes), dtype=torch.bool)
    text = training.tokens_BT.view(1, -1)
    step = _BLOCKS_AT_ONCE * training.seq_len
    for start in range(0, training.num_tokens - run + 1, step):
        found |= torch.isin(hashes, _hashes(text[:, start : start + step + run - 1], run))
    return found


def _runs(training: TokenBlocks, heldout: TokenBlocks) -> tuple[int, Tensor]:
    """Length of the runs that the two are compared by, and the hashes of the held-out text's."""
    run = min(RUN_TOKENS, training.seq_len, heldout.seq_len)
    parts = torch.split(heldout.tokens_BT, _BLOCKS_AT_ONCE)
    return run, torch.cat([_hashes(rows, run)[:, ::run].flatten() for rows in parts])


def _hashes(tokens_BT: Tensor, run: int) -> Tensor:
    """Hash, modulo 2^64, of the `run` tokens that start at each position: [B, T - run + 1]."""
    bases_2T = torch.tensor([[_BASE], [_INVERSE]]).repeat(1, tokens_BT.shape[1])
    powers_T, inverse_T = bases_2T.index_fill_(1, torch.tensor([0]), 1).cumprod(1).unbind()
    sums_BT = ((tokens_BT + 1) * powers_T).cumsum(1)
    sums_BT[:, run:] -= sums_BT[:, :-run].clone()
    return sums_BT[:, run - 1 :] * inverse_T[: len(inverse_T) - run + 1]


@lru_cache(maxsize=4)
def _permutation(num_blocks: int, seed: int, epoch: int) -> Tensor:
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    return torch.randperm(num_blocks, generator=generator)
