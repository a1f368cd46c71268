"""The data stage as `convert` runs it: what is in `0_data`."""

import json
import multiprocessing
import signal
from dataclasses import replace

import pytest
import torch

from dotmoe.config import RunConfig, check
from dotmoe.data import DataConfig, TokenBlocks, documents, pack
from dotmoe.errors import UserError
from dotmoe.load import LoadConfig, load_dense
from dotmoe.narration import Narrator
from dotmoe.run_folder import RunFolder
from dotmoe.self_text import SampleConfig
from dotmoe.tokenise import load_blocks, measured_on, require_sources, tokenise

QUIET = Narrator(quiet=True)


@pytest.fixture(scope="module")
def dense(tiny_dense):
    return load_dense(str(tiny_dense("llama")), LoadConfig(device="cpu"))


@pytest.fixture
def text(tmp_path):
    lines = [json.dumps({"text": f"{i}: the crow ate {i * 7 % 13} figs."}) for i in range(300)]
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def config_of(tmp_path, *data, data_options=None, **changes):
    source = DataConfig(data=data, seq_len=32, **(data_options or {}))
    config = RunConfig(model="m", out=str(tmp_path / "run"), eval_tokens=300, data=source)
    return replace(config, **changes)


def test_the_last_blocks_are_kept_apart(text, dense, tmp_path):
    record = tokenise(config_of(tmp_path, text), dense, tmp_path, QUIET)
    training, heldout = load_blocks(tmp_path)
    expected = pack(documents(DataConfig(data=(text,))), dense.tokenizer).tokens
    both = torch.cat([training.tokens_BT, heldout.tokens_BT]).flatten()
    assert heldout.num_blocks == 10
    assert torch.equal(both, expected[: len(both)])
    assert len(expected) - len(both) < 32
    assert record["training"]["boundaries"]["separator"] == "<s> before each"
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"text.jsonl", "training.safetensors", "heldout.safetensors"}


def test_text_to_measure_on_is_read_in_order_and_unmixed(text, dense, tmp_path):
    options = {"data_weights": (1, 1), "shuffle_buffer": 9}
    config = config_of(tmp_path, text, text, data_options=options, eval_text=(text,))
    check(config)
    require_sources(config)
    record = tokenise(config, dense, tmp_path, QUIET)
    heldout = TokenBlocks.load(tmp_path / "heldout.safetensors").tokens_BT
    expected = pack(documents(DataConfig(data=(text,))), dense.tokenizer, 256).tokens
    assert torch.equal(heldout, expected[None])
    assert len(record["training"]["sources"]) == 2


def test_the_model_itself_may_be_the_source(dense, tmp_path):
    sample = SampleConfig(sample_tokens=400)
    config = config_of(tmp_path, "self", sample=sample)
    require_sources(config)
    record = tokenise(config, dense, tmp_path, QUIET)
    training, heldout = load_blocks(tmp_path)
    assert (training.num_blocks, heldout.num_blocks) == (12, 10)
    assert training.tokens_BT[:, 0].unique().tolist() == [0]
    assert record["training"]["sources"][0]["name"] == "self"
    assert "the dense model itself sampled" in measured_on(config)[0]


def tokenise_in_run_folder(config, dense):
    folder = RunFolder.open(config)
    with folder.alone(), folder.finishing("data") as place:
        tokenise(config, dense, place, QUIET)


def test_a_killed_tokenisation_is_not_taken_for_a_finished_one(text, dense, tmp_path):
    options = {"data_weights": (1.0,), "data_epochs": 10**9}
    endless = replace(RunConfig(model="", out="").align, steps=10**9)
    config = config_of(tmp_path, text, data_options=options, align=endless)
    process = multiprocessing.get_context("fork").Process(
        target=tokenise_in_run_folder, args=(config, dense)
    )
    process.start()
    partial = tmp_path / "run" / "0_data" / "whole.safetensors.partial"
    while not (partial.exists() and partial.stat().st_size > 1 << 20):
        assert process.is_alive()
        process.join(0.05)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not RunFolder(tmp_path / "run").is_finished("data")
    assert not (tmp_path / "run" / "0_data" / "training.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_weights": (1.0, 0.0)}, "data_weights must all be above 0"),
        ({"data_weights": (1.0, float("nan"))}, "data_weights must all be above 0"),
        ({"data_epochs": 0}, "data_epochs is 0"),
        ({"shuffle_buffer": -1}, "shuffle_buffer is -1"),
    ],
)
def test_refuses_numbers_that_no_mix_can_use(options, message, tmp_path):
    with pytest.raises(UserError, match=message):
        check(config_of(tmp_path, "a", "b", data_options=options))
