"""Training blocks that hold a stretch of the held-out text are found and left out."""

import torch
from torch import Tensor

from dotmoe.data.blocks import TokenBlocks
from dotmoe.errors import UserError

RUN_TOKENS = 64
"""Tokens in a row that two texts must share for one to count as part of the other."""

_BASE = 0x9E3779B97F4A7C15 - (1 << 64)
_BLOCKS_AT_ONCE = 256


def decontaminated(training: TokenBlocks, heldout: TokenBlocks) -> tuple[TokenBlocks, int]:
    """Training blocks without those that share a run of tokens with the held-out text.

    The held-out text is cut into runs of `RUN_TOKENS` tokens, and each run is looked for at every
    place of every training block. So a block that holds twice that many held-out tokens in a row is
    certain to be found; one that has only a licence header in common may be.

    Returns:
        The blocks that are left, in order, and the number of blocks left out. Where none is, the
        first is `training` itself.

    Raises:
        UserError: No block is left.
    """
    run = min(RUN_TOKENS, training.seq_len, heldout.seq_len)
    seen = _hashes(heldout.tokens_BT, run)[:, ::run].flatten()
    parts = torch.split(training.tokens_BT, _BLOCKS_AT_ONCE)
    clean_B = torch.cat([~torch.isin(_hashes(rows, run), seen).any(dim=1) for rows in parts])
    left_out = int((~clean_B).sum())
    if left_out == 0:
        return training, 0
    if left_out == training.num_blocks:
        raise UserError(
            f"all {left_out} blocks of training text are part of the held-out text, on which the "
            "result would be measured. Give other data, or other eval_text."
        )
    return TokenBlocks(training.tokens_BT[clean_B]), left_out


def _hashes(tokens_BT: Tensor, run: int) -> Tensor:
    """Hash of the `run` tokens from each place on, modulo 2^64: [B, T - run + 1]."""
    places = tokens_BT.shape[1] - run + 1
    result = torch.zeros(len(tokens_BT), places, dtype=torch.int64)
    for offset in range(run):
        result.mul_(_BASE).add_(tokens_BT[:, offset : offset + places]).add_(1)
    return result
