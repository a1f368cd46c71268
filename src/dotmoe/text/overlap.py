"""What two texts share: runs of tokens in a row, and whole short documents."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from dotmoe.common.errors import UserError
from dotmoe.text.blocks import TokenBlocks, block_writer

RUN_TOKENS = 64
"""Length, in tokens, of the runs of held-out text that no training block may contain."""
_FEWEST_TOKENS = 8
"""Shorter documents are common words."""
_BLOCKS_AT_ONCE = 256
_BASE = 0x9E3779B97F4A7C15 - (1 << 64)
_INVERSE = -0xE217C1E66C88CC3
"""The inverse of `_BASE` modulo 2^64: their product is 1 in int64, which wraps around."""


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
    """Hash, modulo 2^64, of the `run` tokens that start at each position: int64, [B, T - run + 1].

    It is the polynomial rolling hash, the sum of (token + 1) * base^i over a run. The sum of a run
    is a difference of two running sums, in which its first token has the power of its position:
    powers of the inverse shift it, so that each run starts at power 0.
    """
    num_tokens = tokens_BT.shape[1]
    sums_BT = ((tokens_BT + 1) * _powers(_BASE, num_tokens)).cumsum(1)
    sums_BT[:, run:] -= sums_BT[:, :-run].clone()
    return sums_BT[:, run - 1 :] * _powers(_INVERSE, num_tokens - run + 1)


def _powers(base: int, count: int) -> Tensor:
    """Powers 0 to `count` - 1 of a base, modulo 2^64: int64, [count]."""
    bases_T = torch.full((count,), base)
    bases_T[:1] = 1
    return bases_T.cumprod(0)
