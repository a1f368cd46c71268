"""Stage tokenise. Oracles: `pack` on the whole text; of samples, passes without a cache."""

import hashlib
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dotmoe.common.progress import Progress
from dotmoe.text.blocks import TokenBlocks, pack
from dotmoe.text.config import DataConfig, SampleConfig
from dotmoe.text.sources import documents
from dotmoe.text.tokenise import Text, require_sources, sample_blocks, sampled_rows, tokenise


@pytest.fixture(scope="module")
def dense(dense_of):
    return dense_of("llama")


@pytest.fixture
def text(tmp_path):
    lines = [json.dumps({"text": f"{i}: the crow ate {i * 7 % 13} figs."}) for i in range(300)]
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture
def tokenised(dense, tmp_path, monkeypatch):
    """Runs the stage: the text, its record, and the lines that were printed."""

    def make(*data, eval_text=(), beside=None, seq_len=32, **options):
        lines, progress = [], Progress(quiet=True)
        monkeypatch.setattr(progress, "log", lines.append)
        config = DataConfig(data=data, seq_len=seq_len, **options)
        require_sources(config, eval_text)
        folder = tmp_path / "0_data"
        folder.mkdir(exist_ok=True)
        blocks = tokenise(
            config,
            SampleConfig(sample_tokens=400),
            dense,
            folder,
            blocks=30_000,
            eval_text=eval_text,
            eval_tokens=300,
            progress=progress,
            beside=beside,
        )
        record = json.loads((folder / "data.json").read_text())
        files = {"training.safetensors", "heldout.safetensors", "data.json"}
        assert set(os.listdir(folder)) == files
        assert torch.equal(Text.load(folder).training.tokens_BT, blocks.training.tokens_BT)
        return SimpleNamespace(text=blocks, record=record, lines=lines)

    return make


def test_the_last_blocks_are_kept_apart(text, dense, tokenised):
    made = tokenised(text)
    expected = pack(documents(DataConfig(data=(text,))), dense.tokenizer)[0]
    both = torch.cat([made.text.training.tokens_BT, made.text.heldout.tokens_BT]).flatten()
    assert made.text.heldout.num_blocks == 10
    assert torch.equal(both, expected[: len(both)])
    assert len(expected) - len(both) < 32
    assert made.record["training"]["separator"] == "<s> before each"
    assert made.text.heldout_name == ("blocks of the data kept out of training",)
    made = tokenised(text, seq_len=512)
    assert made.text.training.seq_len == 256
    assert made.lines[0] == "seq_len lowered to 256, the context of the model"


def test_text_to_measure_on_is_read_in_order_and_unmixed(text, heldout_file, dense, tokenised):
    other = str(heldout_file)
    made = tokenised(text, text, eval_text=(other,), data_weights=(1.0, 1.0), shuffle_buffer=9)
    expected = pack(documents(DataConfig(data=(other,))), dense.tokenizer, 256)[0]
    assert torch.equal(made.text.heldout.tokens_BT, expected[None])
    assert made.text.heldout_name == (other,)
    assert made.record["overlap"] == 0
    assert len(made.record["training"]["sources"]) == 2
    shares = next(line for line in made.lines if "requested" in line)
    assert shares.count("text.jsonl 50.0% of the tokens (requested 50.0%), ran out after") == 2
    assert not any("is training text" in line for line in made.lines)


@pytest.mark.parametrize("share", [1, 0.5])
def test_text_to_measure_on_that_is_training_text_is_named_so(share, text, tokenised, tmp_path):
    rows = Path(text).read_text().splitlines()
    mine = tmp_path / "mine.jsonl"
    mine.write_text("\n".join([*rows[: int(12 * share)], json.dumps({"text": "x" * 170})]))
    made = tokenised(text, eval_text=(str(mine),), seq_len=128)
    assert made.record["overlap"] == share
    note = f"{made.record['overlap']:.2%} of it training text"
    assert made.text.heldout_name == (str(mine), note)
    assert any(line.endswith("is training text: results on it are no test") for line in made.lines)


def test_the_model_itself_may_be_the_source(tokenised):
    made = tokenised("self")
    training, heldout = made.text.training, made.text.heldout
    assert (training.num_blocks, heldout.num_blocks) == (12, 10)
    assert training.tokens_BT[:, 0].unique().tolist() == [0]
    assert made.record["training"]["sources"][0]["name"] == "self"
    assert "the dense model itself sampled" in made.text.heldout_name[0]


def test_beside_a_run_its_heldout_text_is_taken_with_its_name(text, tokenised):
    """Also where the training text is another, such as samples, of which as many as it asks for."""
    source = tokenised(text).text
    heldout = source.heldout.tokens_BT.clone()
    made = tokenised("self", beside=source)
    assert made.text.heldout_name == source.heldout_name
    assert torch.equal(made.text.heldout.tokens_BT, heldout)
    assert made.text.training.num_tokens <= 400 + heldout.numel() + 32
    made = tokenised(text, beside=source)
    assert made.record["left_out_blocks"] >= 9
    assert any("left out" in line for line in made.lines)


# --- text of the model itself


def generator(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("family", "bos"), [("llama", 0), ("qwen2", None)])
@pytest.mark.filterwarnings("error::FutureWarning")
def test_every_token_is_drawn_given_all_before_it(family, bos, dense_of):
    sampler, draws = dense_of(family), generator(5)
    assert sampler.tokenizer.bos_token_id == bos
    rows = sampled_rows(sampler, 3, 24, generator(5)).long()
    if bos is None:
        plain = torch.tensor([0, *range(2, 258)])  # without </s>
        assert torch.equal(rows[:, 0], plain[torch.randint(len(plain), (3,), generator=draws)])
    else:
        assert rows[:, 0].tolist() == [bos] * 3
    for place in range(1, 24):
        with torch.no_grad():
            logits = sampler.model(input_ids=rows[:, :place], use_cache=False).logits[:, -1, :258]
        expected = torch.multinomial(logits.softmax(-1), 1, generator=draws)[:, 0]
        if bos is not None:
            expected[rows[:, place - 1] == 1] = bos
        assert torch.equal(rows[:, place], expected)


def test_bos_follows_eos_where_both_are_there(dense):
    dense.model.lm_head.weight.data.zero_()  # every token is as likely, so EOS comes often
    rows = sampled_rows(dense, 40, 60, generator(0))
    after = rows[:, 1:][rows[:, :-1] == 1]
    assert len(after) > 3
    assert after.unique().tolist() == [0]
    assert rows.max() < len(dense.tokenizer) < dense.config.vocab_size
    assert math.isclose(float((rows[:, 1:] > 129).float().mean()), 0.5, abs_tol=0.05)


def test_each_block_is_a_sample_of_its_own_and_of_the_seed(dense, tmp_path):
    samples, updates = [], []
    for number, seed in enumerate((0, 0, 1)):
        path, data = tmp_path / f"{number}.safetensors", DataConfig(seq_len=10, data_seed=seed)
        arguments = dense, SampleConfig(sample_batch_size=3), path, data, 65
        assert sample_blocks(*arguments, lambda *update: updates.append(update))["tokens"] == 70
        samples.append(TokenBlocks.load(path).tokens_BT)
    assert samples[0].shape == samples[0].unique(dim=0).shape == (7, 10)
    first = int.from_bytes(hashlib.sha256(b"0/0").digest()[:7], "little")
    assert torch.equal(samples[0][:3], sampled_rows(dense, 3, 10, generator(first)))
    assert torch.equal(samples[0], samples[1])
    assert not torch.equal(samples[0], samples[2])
    assert updates == [(30, 65), (60, 65), (65, 65)] * 3
    assert len(os.listdir(tmp_path)) == 3
