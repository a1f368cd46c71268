"""Which training blocks are left out. Oracle: plain search of every run of tokens."""

import pytest
import torch

from dotmoe import data
from dotmoe.data import TokenBlocks, write_decontaminated
from dotmoe.errors import UserError


def holds_a_run(row, heldout_rows, run):
    text = tuple(row.tolist())
    stretches = {text[at : at + run] for at in range(len(text) - run + 1)}
    return any(
        tuple(held[at : at + run].tolist()) in stretches
        for held in heldout_rows
        for at in range(0, len(held) - run + 1, run)
    )


def written(training, heldout, folder):
    path = folder / "left.safetensors"
    left_out = write_decontaminated(TokenBlocks(training), TokenBlocks(heldout), path)
    return TokenBlocks.load(path).tokens_BT, left_out


def test_exactly_the_blocks_that_share_a_run_are_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(data, "RUN_TOKENS", 4)
    monkeypatch.setattr(data, "_BLOCKS_AT_ONCE", 7)
    training = torch.randint(0, 4, (40, 12), dtype=torch.int32)
    heldout = torch.randint(0, 4, (9, 9), dtype=torch.int32)
    left, left_out = written(training, heldout[:3], tmp_path)
    expected = [row for row in training if not holds_a_run(row, heldout[:3], 4)]
    assert 0 < len(expected) < 40
    assert left_out == 40 - len(expected)
    assert torch.equal(left, torch.stack(expected))
    left, _ = written(training, heldout, tmp_path)
    expected = [row for row in training if not holds_a_run(row, heldout, 4)]
    assert torch.equal(left, torch.stack(expected))


def test_a_held_out_text_cut_otherwise_is_found(tmp_path):
    text = torch.randint(2, 30_000, (2_048,), dtype=torch.int32)
    other = torch.randint(2, 30_000, (1_024,), dtype=torch.int32)
    training = torch.cat([other, text[37:1_061]]).view(-1, 256)
    left, left_out = written(training, text.view(4, 512), tmp_path)
    assert left_out == 4
    assert torch.equal(left, other.view(-1, 256))
    left, left_out = written(other.view(-1, 256), text.view(4, 512), tmp_path)
    assert left_out == 0
    assert torch.equal(left, other.view(-1, 256))


def test_nothing_left_is_refused_and_leaves_no_file(tmp_path):
    tokens = torch.randint(2, 30_000, (4, 128), dtype=torch.int32)
    with pytest.raises(UserError, match="all 4 blocks of training text are part of the held-out"):
        written(tokens, tokens, tmp_path)
    assert not list(tmp_path.iterdir())
