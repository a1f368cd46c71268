"""Blocks: what a step gets, files, and which are left out as part of the held-out text.

Oracles: safetensors, tensors in memory, a kill; plain search of every run of tokens.
"""

import multiprocessing
import os
import resource
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dotmoe.common.errors import UserError
from dotmoe.text import overlap as search
from dotmoe.text.blocks import TokenBlocks, block_writer, split_off_tail
from dotmoe.text.overlap import contained, overlap, write_decontaminated


def numbered(num_blocks, seq_len=4):
    tokens = torch.arange(num_blocks * seq_len, dtype=torch.int32)
    return TokenBlocks(tokens.view(num_blocks, seq_len))


def written(path, tokens, seq_len, piece):
    with block_writer(path, seq_len) as writer:
        for start in range(0, len(tokens), piece):
            writer.append(tokens[start : start + piece])


# --- batches


@pytest.mark.parametrize(("num_blocks", "batch_size"), [(7, 12), (8, 6), (40, 6), (1, 6)])
def test_every_epoch_shows_every_block_once_on_any_number_of_ranks(num_blocks, batch_size):
    blocks = numbered(num_blocks)
    dealt = [blocks.batch(step, batch_size, 3) for step in range(6 + 4 * num_blocks)]
    for epoch in (torch.cat(dealt)[:, 0] // 4).split(num_blocks)[:-1]:
        assert epoch.sort().values.tolist() == list(range(num_blocks))
    fresh = numbered(num_blocks)  # a batch depends on its arguments alone
    for ranks in (1, 2, 3, 6):
        for step in (5, 3, 0):
            parts = [fresh.batch(step, batch_size, 3, rank, ranks) for rank in range(ranks)]
            assert {len(part) for part in parts} == {batch_size // ranks}
            assert torch.equal(torch.cat(parts), dealt[step])
    assert dealt[0].dtype == torch.int64


@pytest.mark.parametrize(("num_tokens", "rows"), [(1, [0]), (12, [0, 3, 6]), (99, range(10))])
def test_blocks_are_drawn_evenly_over_the_text(num_tokens, rows):
    blocks = numbered(10)
    assert torch.equal(blocks.drawn(num_tokens), blocks.tokens_BT[list(rows)].long())


def test_epochs_and_seeds_have_orders_of_their_own():
    blocks, places = numbered(100), [(epoch, seed) for seed in range(4) for epoch in range(5)]
    orders = {tuple(blocks.batch(epoch, 100, seed)[:, 0].tolist()) for epoch, seed in places}
    assert len(orders) == 20
    assert len({order[0] for order in orders}) > 10


# --- files


@pytest.mark.parametrize("piece", [1, 7, 300_000])
def test_pieces_of_any_length_give_the_file_that_safetensors_writes(tmp_path, piece):
    tokens = torch.randint(0, 2**31 - 1, (5003,), dtype=torch.int32)
    expected = tokens[: 16 * 312].view(-1, 16)
    for given in (tokens, tokens.tolist()):
        written(tmp_path / "a.safetensors", given, 16, piece)
        assert torch.equal(load_file(tmp_path / "a.safetensors")["tokens"], expected)
        assert torch.equal(TokenBlocks.load(tmp_path / "a.safetensors").tokens_BT, expected)
    assert os.listdir(tmp_path) == ["a.safetensors"]


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux' own figures")
def test_loading_takes_no_memory_of_its_own(tmp_path):
    def resident_kib():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

    path = tmp_path / "a.safetensors"
    written(path, torch.zeros(1 << 24, dtype=torch.int32), 1024, 1 << 18)
    before = resident_kib()
    blocks = TokenBlocks.load(path)
    blocks.batch(3, 8, 0)
    assert resident_kib() - before < 0.25 * 4 * blocks.num_tokens / 1024


@pytest.mark.parametrize("stop", [KeyboardInterrupt, None])
def test_a_writer_of_the_same_job_goes_on_from_what_was_kept(tmp_path, stop):
    """After an exception, and after a kill, neither of which touches an older file."""
    path, job = tmp_path / "a.safetensors", {"data": ("x", 1.5)}
    written(path, [7] * 64, 8, 64)

    def write_and_die():
        with block_writer(path, 8, job) as writer:
            writer.append([1] * 20)
            writer.kept -= 11
            writer.keep({"place": 20})
            writer.append([9] * (1 << 21))
            writer.keep({"place": 0})  # too soon
            if stop:
                raise stop
            os.kill(os.getpid(), signal.SIGKILL)

    if stop:
        with pytest.raises(stop):
            write_and_die()
    else:
        process = multiprocessing.get_context("fork").Process(target=write_and_die)
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert TokenBlocks.load(path).tokens_BT.flatten().tolist() == [7] * 64
    with block_writer(path, 8, job) as writer:
        assert (writer.state, writer.num_tokens) == ({"place": 20}, 20)
        writer.append([2] * 20)
    assert TokenBlocks.load(path).tokens_BT.flatten().tolist() == [1] * 20 + [2] * 20
    assert os.listdir(tmp_path) == ["a.safetensors"]


@pytest.mark.parametrize("change", ["job", "tokens", "state.json"])
def test_what_was_kept_of_another_job_or_is_damaged_is_not_used(tmp_path, change):
    path, parts = tmp_path / "a.safetensors", tmp_path / "a.safetensors.parts"
    with suppress(KeyboardInterrupt), block_writer(path, 8, {"seed": 0}) as writer:
        writer.append([1] * 20)
        writer.kept -= 11
        writer.keep({})
        raise KeyboardInterrupt
    if change != "job":
        (parts / change).write_bytes((parts / change).read_bytes()[:-4])
    with block_writer(path, 8, {"seed": int(change == "job")}) as writer:
        assert writer.num_tokens == 0
        writer.append([2] * 16)
    assert TokenBlocks.load(path).tokens_BT.flatten().tolist() == [2] * 16


def test_a_save_that_fails_keeps_the_old_file(tmp_path):
    path = tmp_path / "blocks.safetensors"
    numbered(5).save(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(UserError, match=r"cannot be written.*Make room"):
            numbered(10_000).save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(ValueError, match="'x'"), block_writer(path, 8) as writer:
        writer.append([int(sign) for sign in "1234567x"])
    assert os.listdir(tmp_path) == ["blocks.safetensors"]
    assert TokenBlocks.load(path).num_blocks == 5
    with pytest.raises(UserError, match="cannot be written"):
        numbered(3).save(tmp_path / "none" / "a.safetensors")


def test_refuses_a_damaged_or_missing_file_of_blocks(tmp_path):
    path = tmp_path / "blocks.safetensors"
    numbered(5).save(path)
    content = bytearray(path.read_bytes())
    content[30] ^= 1
    for change in (lambda: path.write_bytes(content), path.unlink):
        change()
        with pytest.raises(UserError, match=r"blocks.safetensors .*Delete it to tokenise again"):
            TokenBlocks.load(path)


@pytest.mark.parametrize(("tokens", "head"), [(9, 7), (12, 7), (10_000, 5)])
def test_a_tail_of_whole_blocks_is_split_off_in_place(tmp_path, tokens, head):
    path, tail = tmp_path / "a.safetensors", tmp_path / "tail.safetensors"
    numbered(10).save(path)
    split_off_tail(path, tail, tokens)
    parts = [TokenBlocks.load(file).tokens_BT for file in (path, tail)]
    assert len(parts[0]) == head
    assert torch.equal(torch.cat(parts), numbered(10).tokens_BT)
    numbered(1).save(path)
    with pytest.raises(UserError, match="gives 1 block of 4 tokens"):
        split_off_tail(path, tail, tokens)


# --- training text without the held-out text


def holds_a_run(row, heldout_rows, run):
    stretches = set(map(tuple, row.unfold(0, run, 1).tolist()))
    return any(
        stretches.intersection(map(tuple, r.unfold(0, run, run).tolist())) for r in heldout_rows
    )


def decontaminated(training, heldout, folder):
    path = folder / "left.safetensors"
    left_out = write_decontaminated(TokenBlocks(training), TokenBlocks(heldout), path)
    return TokenBlocks.load(path).tokens_BT, left_out


@pytest.mark.parametrize("num_heldout", [3, 9])
def test_exactly_the_blocks_that_share_a_run_are_left_out(num_heldout, monkeypatch, tmp_path):
    monkeypatch.setattr(search, "RUN_TOKENS", 4)
    monkeypatch.setattr(search, "_BLOCKS_AT_ONCE", 7)
    training = torch.randint(0, 4, (40, 12), dtype=torch.int32)
    heldout = torch.randint(0, 4, (9, 9), dtype=torch.int32)[:num_heldout]
    left, left_out = decontaminated(training, heldout, tmp_path)
    expected = [row for row in training if not holds_a_run(row, heldout, 4)]
    assert 0 < len(expected) == 40 - left_out < 40
    assert torch.equal(left, torch.stack(expected))


def test_documents_that_are_shorter_than_a_run_are_found_whole(tmp_path):
    """Rows of a data set in another order; what every row repeats is no leak."""
    rows = [torch.randint(2, 30_000, (38,), dtype=torch.int32) for _ in range(400)]
    begin, header = torch.tensor([1], dtype=torch.int32), torch.arange(2, 22, dtype=torch.int32)

    def text(numbers, extra=()):
        parts = [torch.cat([begin, *extra, rows[number]]) for number in numbers]
        joined = torch.cat(parts)
        return TokenBlocks(joined[: len(joined) // 256 * 256].view(-1, 256))

    shuffled = [int(number) for number in torch.randperm(400)]
    assert overlap(text(range(400)), text(shuffled)) < 0.2
    assert overlap(text(range(400)), text(shuffled), 1) > 0.9
    assert overlap(text(range(200)), text(range(200, 400)), 1) == 0
    both = (header, begin)
    assert overlap(text(range(200), both), text(range(200, 400), both), 1) == 0
    path = tmp_path / "left.safetensors"
    held = text(range(360, 400))
    left_out = write_decontaminated(text(range(400)), held, path, separator=1)
    assert left_out == pytest.approx(40 * 39 / 256, abs=2)


def test_a_held_out_text_cut_otherwise_is_found_and_nothing_else(tmp_path):
    text = torch.randint(2, 30_000, (2_048,), dtype=torch.int32)
    other = torch.randint(2, 30_000, (1_024,), dtype=torch.int32)
    for training, expected in ((torch.cat([other, text[37:1_061]]), 4), (other, 0)):
        left, left_out = decontaminated(training.view(-1, 256), text.view(4, 512), tmp_path)
        assert left_out == expected
        assert torch.equal(left, other.view(-1, 256))
        share = overlap(TokenBlocks(training.view(-1, 256)), TokenBlocks(text.view(4, 512)))
        runs = [row[run : run + 64] for row in text.view(4, 512) for run in range(0, 449, 64)]
        rows = training.unfold(0, 64, 1)
        found = [bool((rows == run).all(1).any()) for run in runs]
        assert share == sum(found) / len(found)
        assert bool(share) == bool(expected)
    (tmp_path / "left.safetensors").unlink()
    with pytest.raises(UserError, match="all 4 blocks of training text are part of the held-out"):
        decontaminated(text.view(4, 512), text.view(4, 512), tmp_path)
    assert not list(tmp_path.iterdir())


def test_ends_of_sequences_are_found_in_the_training_text(tmp_path):
    """Oracle: a search at every place, over the ends of blocks too."""
    draw = torch.Generator().manual_seed(0)
    rows_BT = torch.randint(0, 50, (300, 40), generator=draw, dtype=torch.int32)
    text = rows_BT.flatten().tolist()
    there = [text[100:300], text[20:31], text[-70:], text[33:97]]
    absent = [[*text[100:299], 51], [51, *text[20:30]], [*text[33:96], 51]]
    found = contained(TokenBlocks(rows_BT), there + absent)
    ends = [run[-64:] for run in there + absent]
    assert found.tolist() == [
        any(text[place : place + len(end)] == end for place in range(len(text))) for end in ends
    ]
    assert found.tolist() == [True] * 4 + [False] * 3
