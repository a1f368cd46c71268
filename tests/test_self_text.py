"""Text sampled from the dense model. Oracle: full forward passes without a cache, same draws."""

import math
import os

import pytest
import torch

from dotmoe.data import TokenBlocks
from dotmoe.load import LoadConfig, load_dense
from dotmoe.self_text import SampleConfig, sample_blocks, sampled_rows


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def dense(request, tiny_dense):
    return load_dense(str(tiny_dense(request.param)), LoadConfig(device="cpu"))


def generator(seed):
    return torch.Generator().manual_seed(seed)


def sampled(dense, path, seed=0):
    config = SampleConfig(sample_batch_size=3)
    return sample_blocks(dense, config, path, seq_len=10, num_tokens=70, seed=seed)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_every_token_is_drawn_given_all_before_it(dense, temperature):
    rows = sampled_rows(dense, 3, 24, temperature, generator(5)).long()
    draws = generator(5)
    if dense.tokenizer.bos_token_id is None:
        torch.randint(len(dense.tokenizer) - len(dense.tokenizer.all_special_ids), (3,),
                      generator=draws)  # fmt: skip
    for place in range(1, 24):
        with torch.no_grad():
            logits = dense.model(input_ids=rows[:, :place], use_cache=False).logits[:, -1, :258]
        probabilities = (logits / temperature).softmax(-1)
        expected = torch.multinomial(probabilities, 1, generator=draws)[:, 0]
        if dense.tokenizer.bos_token_id is not None:
            expected[rows[:, place - 1] == dense.tokenizer.eos_token_id] = 0
        assert torch.equal(rows[:, place], expected)


def test_rows_begin_with_bos_or_with_a_plain_token_of_their_own(dense):
    first = sampled_rows(dense, 64, 2, 1.0, generator(0))[:, 0]
    if dense.tokenizer.bos_token_id is not None:
        assert first.unique().tolist() == [0]
    else:
        assert not set(first.tolist()) & set(dense.tokenizer.all_special_ids)
        assert len(first.unique()) > 40


def test_bos_follows_eos_where_both_are_there(tiny_dense):
    dense = load_dense(str(tiny_dense("llama")), LoadConfig(device="cpu"))
    # Infinite temperature: every token is as likely, so EOS comes often.
    rows = sampled_rows(dense, 40, 60, 1e9, generator(0))
    after = rows[:, 1:][rows[:, :-1] == 1]
    assert len(after) > 3
    assert after.unique().tolist() == [0]
    assert rows.max() < len(dense.tokenizer) < dense.config.vocab_size
    assert math.isclose(float((rows[:, 1:] > 129).float().mean()), 0.5, abs_tol=0.05)


def test_blocks_are_a_function_of_seed_and_config(dense, tmp_path):
    blocks, record = sampled(dense, tmp_path / "a.safetensors")
    again, _ = sampled(dense, tmp_path / "b.safetensors")
    other, _ = sampled(dense, tmp_path / "c.safetensors", seed=1)
    assert (blocks.num_blocks, blocks.seq_len) == (7, 10)
    assert torch.equal(blocks.tokens_BT, again.tokens_BT)
    assert not torch.equal(blocks.tokens_BT, other.tokens_BT)
    assert len(blocks.tokens_BT.unique(dim=0)) == 7
    assert (record["tokens"], record["sampling"]["temperature"]) == (70, 1.0)
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b.safetensors", "c.safetensors"]


def test_a_run_that_was_stopped_goes_on_and_ends_the_same(dense, tmp_path, monkeypatch):
    expected, _ = sampled(dense, tmp_path / "a.safetensors")
    path = tmp_path / "b.safetensors"
    calls = []

    def stopped(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return sampled_rows(*arguments)

    monkeypatch.setattr("dotmoe.self_text.sampled_rows", stopped)
    with pytest.raises(KeyboardInterrupt):
        sampled(dense, path)
    assert not path.exists()
    blocks, _ = sampled(dense, path)
    assert len(calls) == 2 + 2  # the first batch was not sampled again
    assert torch.equal(blocks.tokens_BT, expected.tokens_BT)
    assert torch.equal(TokenBlocks.load(path).tokens_BT, expected.tokens_BT)
