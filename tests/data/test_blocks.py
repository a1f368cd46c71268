"""Blocks: what a step gets, and what is on disk."""

import resource
from collections import Counter

import numpy as np
import pytest
import torch

from dotmoe.data import TokenBlocks, split_off_tail
from dotmoe.errors import UserError


def numbered_blocks(num_blocks, seq_len=4):
    return TokenBlocks(
        torch.arange(num_blocks * seq_len, dtype=torch.int32).view(num_blocks, seq_len)
    )


@pytest.mark.parametrize(("num_blocks", "batch_size"), [(7, 3), (8, 4), (5, 12), (1, 2)])
def test_every_epoch_shows_every_block_once_even_across_batches(num_blocks, batch_size):
    blocks = numbered_blocks(num_blocks)
    steps = 5 * num_blocks
    dealt = torch.cat([blocks.batch(step, batch_size, seed=3) for step in range(steps)])
    rows = (dealt[:, 0] // 4).tolist()
    for epoch in range(len(rows) // num_blocks):
        part = rows[epoch * num_blocks : (epoch + 1) * num_blocks]
        assert sorted(part) == list(range(num_blocks))
    assert dealt.dtype == torch.int64


def test_a_batch_depends_on_its_arguments_alone():
    blocks = numbered_blocks(50)
    in_order = [blocks.batch(step, 7, seed=1) for step in range(40)]
    fresh = numbered_blocks(50)
    for step in (39, 3, 20, 0):
        assert torch.equal(fresh.batch(step, 7, seed=1), in_order[step])


def test_epochs_and_seeds_have_orders_of_their_own():
    blocks = numbered_blocks(100)
    orders = [
        tuple(blocks.batch(epoch, 100, seed)[:, 0].tolist())
        for seed in range(4)
        for epoch in range(5)
    ]
    assert len(set(orders)) == 20
    # Where a block lands is spread evenly: mean place near the middle for each of 100 blocks.
    places = np.argsort(np.array(orders), axis=1).mean()
    assert places == pytest.approx(49.5)
    assert max(Counter(order[0] for order in orders).values()) <= 3


def test_saving_replaces_and_a_failed_save_keeps_the_old_file(tmp_path):
    path = tmp_path / "blocks.safetensors"
    numbered_blocks(3).save(path)
    numbered_blocks(5).save(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(UserError, match=r"cannot be written after 160,000 bytes"):
            numbered_blocks(10_000).save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [item.name for item in tmp_path.iterdir()] == ["blocks.safetensors"]
    assert TokenBlocks.load(path).num_blocks == 5


@pytest.mark.parametrize("place", [30, None])
def test_refuses_a_damaged_or_missing_file_of_blocks(tmp_path, place):
    path = tmp_path / "blocks.safetensors"
    if place is not None:
        numbered_blocks(5).save(path)
        content = bytearray(path.read_bytes())
        content[place] ^= 1
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"blocks.safetensors .*Delete it to tokenise again"):
        TokenBlocks.load(path)


def test_a_tail_is_split_off_in_place(tmp_path):
    path, tail = tmp_path / "a.safetensors", tmp_path / "tail.safetensors"
    blocks = numbered_blocks(10)
    blocks.save(path)
    split_off_tail(path, tail, 9)
    expected = blocks.without_tail(9)
    for file, part in zip((path, tail), expected, strict=True):
        assert torch.equal(TokenBlocks.load(file).tokens_BT, part.tokens_BT)
        part.save(tmp_path / "same")
        assert file.read_bytes() == (tmp_path / "same").read_bytes()


def test_the_tail_is_kept_apart_in_whole_blocks():
    blocks = numbered_blocks(10)
    head, tail = blocks.without_tail(9)
    assert (head.num_blocks, tail.num_blocks) == (7, 3)
    assert torch.equal(torch.cat([head.tokens_BT, tail.tokens_BT]), blocks.tokens_BT)
    head, tail = blocks.without_tail(10_000)
    assert (head.num_blocks, tail.num_blocks) == (5, 5)
    with pytest.raises(UserError, match="gives 1 block of 4 tokens"):
        numbered_blocks(1).without_tail(4)


@pytest.mark.parametrize(("num_blocks", "batch_size"), [(7, 12), (40, 6), (1, 6)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_the_ranks_parts_are_the_batch_of_one_rank(num_blocks, batch_size, ranks):
    blocks = numbered_blocks(num_blocks)
    for step in range(9):
        parts = [blocks.batch(step, batch_size, 5, rank, ranks) for rank in range(ranks)]
        assert {len(part) for part in parts} == {batch_size // ranks}
        assert torch.equal(torch.cat(parts), blocks.batch(step, batch_size, 5))


def test_ranks_of_any_number_see_every_block_once_an_epoch_after_resuming_anywhere():
    num_blocks, batch_size = 60, 12
    for resumed_at in range(5):
        seen = []
        for step in range(5):
            ranks = 2 if step < resumed_at else 4  # goes on on twice the ranks
            fresh = numbered_blocks(num_blocks)
            for rank in range(ranks):
                seen += (fresh.batch(step, batch_size, 0, rank, ranks)[:, 0] // 4).tolist()
        assert sorted(seen) == list(range(num_blocks))
        assert seen == [
            row
            for step in range(5)
            for row in (numbered_blocks(num_blocks).batch(step, batch_size, 0)[:, 0] // 4).tolist()
        ]
