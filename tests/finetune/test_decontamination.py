"""Which training blocks are left out. Oracle: plain search of every run of tokens."""

import pytest
import torch

from dotmoe.data import TokenBlocks, decontaminated, decontamination
from dotmoe.errors import UserError


def holds_a_run(row, heldout_rows, run):
    text = tuple(row.tolist())
    stretches = {text[at : at + run] for at in range(len(text) - run + 1)}
    return any(
        tuple(held[at : at + run].tolist()) in stretches
        for held in heldout_rows
        for at in range(0, len(held) - run + 1, run)
    )


def test_exactly_the_blocks_that_share_a_run_are_left_out(monkeypatch):
    monkeypatch.setattr(decontamination, "RUN_TOKENS", 4)
    monkeypatch.setattr(decontamination, "_BLOCKS_AT_ONCE", 7)
    training = torch.randint(0, 4, (40, 12), dtype=torch.int32)
    heldout = torch.randint(0, 4, (3, 9), dtype=torch.int32)
    left, left_out = decontaminated(TokenBlocks(training), TokenBlocks(heldout))
    expected = [row for row in training if not holds_a_run(row, heldout, 4)]
    assert 0 < len(expected) < 40
    assert left_out == 40 - len(expected)
    assert torch.equal(left.tokens_BT, torch.stack(expected))


def test_a_held_out_text_cut_otherwise_is_found():
    text = torch.randint(2, 30_000, (2_048,), dtype=torch.int32)
    other = torch.randint(2, 30_000, (1_024,), dtype=torch.int32)
    training = TokenBlocks(torch.cat([other, text[37:1_061]]).view(-1, 256))
    left, left_out = decontaminated(training, TokenBlocks(text.view(4, 512)))
    assert left_out == 4
    assert torch.equal(left.tokens_BT, other.view(-1, 256))
    clean = TokenBlocks(other.view(-1, 256))
    assert decontaminated(clean, TokenBlocks(text.view(4, 512))) == (clean, 0)


def test_nothing_left_is_refused():
    blocks = TokenBlocks(torch.randint(2, 30_000, (4, 128), dtype=torch.int32))
    with pytest.raises(UserError, match="all 4 blocks of training text are part of the held-out"):
        decontaminated(blocks, blocks)
