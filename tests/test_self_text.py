"""Text sampled from the dense model. Oracle: full forward passes without a cache, same draws."""

import math
import os

import pytest
import torch

from dotmoe.data import TokenBlocks
from dotmoe.data.sources import DataConfig
from dotmoe.tokenise import SampleConfig, sample_blocks, sampled_rows


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def dense(request, dense_of):
    return dense_of(request.param)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def sampled(dense, path, seed=0):
    data = DataConfig(seq_len=10, data_seed=seed)
    record = sample_blocks(dense, SampleConfig(sample_batch_size=3), path, data, 65)
    assert record["tokens"] == 70
    return TokenBlocks.load(path).tokens_BT


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_every_token_is_drawn_given_all_before_it(dense, temperature):
    rows = sampled_rows(dense, 3, 24, temperature, generator(5)).long()
    draws, tokenizer = generator(5), dense.tokenizer
    if tokenizer.bos_token_id is None:
        plain = len(tokenizer) - len(tokenizer.all_special_ids)
        torch.randint(plain, (3,), generator=draws)
    for place in range(1, 24):
        with torch.no_grad():
            logits = dense.model(input_ids=rows[:, :place], use_cache=False).logits[:, -1, :258]
        probabilities = (logits / temperature).softmax(-1)
        expected = torch.multinomial(probabilities, 1, generator=draws)[:, 0]
        if tokenizer.bos_token_id is not None:
            expected[rows[:, place - 1] == tokenizer.eos_token_id] = 0
        assert torch.equal(rows[:, place], expected)


def test_rows_begin_with_bos_or_with_a_plain_token_of_their_own(dense):
    first = sampled_rows(dense, 64, 2, 1.0, generator(0))[:, 0]
    if dense.tokenizer.bos_token_id is not None:
        assert first.unique().tolist() == [0]
    else:
        assert not set(first.tolist()) & set(dense.tokenizer.all_special_ids)
        assert len(first.unique()) > 40


def test_bos_follows_eos_where_both_are_there(dense_of):
    dense = dense_of("llama")
    # Infinite temperature: every token is as likely, so EOS comes often.
    rows = sampled_rows(dense, 40, 60, 1e9, generator(0))
    after = rows[:, 1:][rows[:, :-1] == 1]
    assert len(after) > 3
    assert after.unique().tolist() == [0]
    assert rows.max() < len(dense.tokenizer) < dense.config.vocab_size
    assert math.isclose(float((rows[:, 1:] > 129).float().mean()), 0.5, abs_tol=0.05)


def test_a_run_that_was_stopped_goes_on_and_ends_the_same(dense, tmp_path, monkeypatch):
    expected = sampled(dense, tmp_path / "a.safetensors")
    assert expected.shape == (7, 10)
    assert len(expected.unique(dim=0)) == 7
    assert not torch.equal(expected, sampled(dense, tmp_path / "c.safetensors", seed=1))
    calls = []

    def stopped(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return sampled_rows(*arguments)

    monkeypatch.setattr("dotmoe.tokenise.sampled_rows", stopped)
    with pytest.raises(KeyboardInterrupt):
        sampled(dense, tmp_path / "b.safetensors")
    assert not (tmp_path / "b.safetensors").exists()
    assert torch.equal(sampled(dense, tmp_path / "b.safetensors"), expected)
    assert len(calls) == 2 + 2  # the first batch was not sampled again
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b.safetensors", "c.safetensors"]
