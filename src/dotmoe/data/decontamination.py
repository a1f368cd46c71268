"""Training blocks that hold a stretch of the held-out text are found and left out."""

from pathlib import Path

import torch
from torch import Tensor

from dotmoe.data.blocks import BlockWriter, TokenBlocks
from dotmoe.errors import UserError

RUN_TOKENS = 64
"""Tokens in a row that two texts must share for one to count as part of the other."""

_BASE = 0x9E3779B97F4A7C15 - (1 << 64)
_BLOCKS_AT_ONCE = 256


def write_decontaminated(training: TokenBlocks, heldout: TokenBlocks, path: Path) -> int:
    """Write the training blocks that share no run of tokens with the held-out text.

    The held-out text is cut into runs of `RUN_TOKENS` tokens, and each run is looked for at every
    place of every training block. So a block that holds twice that many held-out tokens in a row is
    certain to be found; one that has only a licence header in common may be.

    Args:
        training: May be mapped from another file: a few blocks are in memory at a time.
        heldout: Of which one number for each run is in memory.
        path: Receives the blocks that are left, in order; see `TokenBlocks.save`.

    Returns:
        How many blocks are left out.

    Raises:
        UserError: No block is left, or there is no room; then there is no file.
    """
    run = min(RUN_TOKENS, training.seq_len, heldout.seq_len)
    parts = torch.split(heldout.tokens_BT, _BLOCKS_AT_ONCE)
    seen = torch.cat([_hashes(rows, run)[:, ::run].flatten() for rows in parts])
    with BlockWriter(path, training.seq_len) as writer:
        for rows in torch.split(training.tokens_BT, _BLOCKS_AT_ONCE):
            clean_B = ~torch.isin(_hashes(rows, run), seen).any(dim=1)
            writer.append(rows[clean_B].flatten())
        left_out = training.num_blocks - writer.num_tokens // training.seq_len
        if left_out == training.num_blocks:
            raise UserError(
                f"all {left_out} blocks of training text are part of the held-out text, on which "
                "the result would be measured. Give other data, or other eval_text."
            )
        writer.finish()
    return left_out


def _hashes(tokens_BT: Tensor, run: int) -> Tensor:
    """Hash of the `run` tokens from each place on, modulo 2^64: [B, T - run + 1]."""
    places = tokens_BT.shape[1] - run + 1
    result = torch.zeros(len(tokens_BT), places, dtype=torch.int64)
    for offset in range(run):
        result.mul_(_BASE).add_(tokens_BT[:, offset : offset + places]).add_(1)
    return result
