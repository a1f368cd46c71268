"""Blocks on disk. Oracles: safetensors' own writer and reader, tensors in memory, a kill."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dotmoe.data import BlockWriter, TokenBlocks
from dotmoe.errors import UserError


def write_without_end(path, told):
    with BlockWriter(path, 8) as writer:
        while True:
            writer.append(list(range(1 << 18)))
            told.put(None)


def resident_kib():
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def written(path, tokens, seq_len, piece):
    with BlockWriter(path, seq_len) as writer:
        for start in range(0, len(tokens), piece):
            writer.append(tokens[start : start + piece])
        return writer.finish()


@pytest.mark.parametrize("piece", [1, 7, 1000, 300_000])
def test_pieces_of_any_length_give_the_file_that_safetensors_writes(tmp_path, piece):
    tokens = torch.randint(0, 2**31 - 1, (5003,), dtype=torch.int32)
    num_blocks = written(tmp_path / "a.safetensors", tokens.tolist(), 16, piece)
    expected = tokens[: 16 * (5003 // 16)].view(-1, 16)
    assert num_blocks == len(expected) == 312
    assert torch.equal(load_file(tmp_path / "a.safetensors")["tokens"], expected)
    assert torch.equal(TokenBlocks.load(tmp_path / "a.safetensors").tokens_BT, expected)
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_many_flushes_and_a_block_longer_than_a_flush(tmp_path):
    tokens = torch.arange(1_000_003, dtype=torch.int32)
    for seq_len in (64, 300_001):
        written(tmp_path / "a.safetensors", tokens, seq_len, 90_001)
        whole = len(tokens) // seq_len * seq_len
        loaded = TokenBlocks.load(tmp_path / "a.safetensors")
        assert torch.equal(loaded.tokens_BT, tokens[:whole].view(-1, seq_len))


def test_mapped_blocks_give_the_batches_of_those_in_memory(tmp_path):
    blocks = TokenBlocks(torch.randint(0, 9000, (333, 24), dtype=torch.int32))
    blocks.save(tmp_path / "a.safetensors")
    mapped = TokenBlocks.load(tmp_path / "a.safetensors")
    for step in (0, 5, 77):
        assert torch.equal(mapped.batch(step, 32, 1, 1, 2), blocks.batch(step, 32, 1, 1, 2))
    for part, expected in zip(mapped.without_tail(50), blocks.without_tail(50), strict=True):
        part.save(tmp_path / "part.safetensors")
        again = TokenBlocks.load(tmp_path / "part.safetensors")
        assert torch.equal(again.tokens_BT, expected.tokens_BT)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux' own figures")
def test_loading_takes_no_memory_of_its_own(tmp_path):
    path = tmp_path / "a.safetensors"
    with BlockWriter(path, 1024) as writer:
        for _ in range(64):
            writer.append(torch.zeros(1 << 18, dtype=torch.int32))
        writer.finish()
    before = resident_kib()
    blocks = TokenBlocks.load(path)
    blocks.batch(3, 8, 0)
    grown_kib, num_tokens = resident_kib() - before, blocks.num_tokens
    assert num_tokens == 1 << 24
    assert grown_kib < 0.25 * 4 * num_tokens / 1024


def test_a_killed_writer_leaves_nothing_of_the_right_name(tmp_path):
    path = tmp_path / "a.safetensors"
    written(path, [1] * 64, 8, 64)
    fork = multiprocessing.get_context("fork")
    told = fork.SimpleQueue()
    process = fork.Process(target=write_without_end, args=(path, told))
    process.start()
    for _ in range(3):
        told.get()
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    partial = tmp_path / "a.safetensors.partial"
    assert partial.stat().st_size > 1 << 20
    assert TokenBlocks.load(path).num_tokens == 64
    with pytest.raises(UserError, match="Delete it to tokenise again"):
        TokenBlocks.load(partial)
    written(path, [2] * 80, 8, 80)
    assert os.listdir(tmp_path) == ["a.safetensors"]
    assert TokenBlocks.load(path).tokens_BT.unique().tolist() == [2]


def test_an_exception_leaves_nothing(tmp_path):
    path = tmp_path / "a.safetensors"
    with pytest.raises(ValueError, match="'x'"), BlockWriter(path, 8) as writer:
        writer.append([int(sign) for sign in "1234567x"])
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_there_is_said_in_one_line(tmp_path):
    with pytest.raises(UserError, match="cannot be written after 0 bytes"):
        BlockWriter(tmp_path / "none" / "a.safetensors", 8)
