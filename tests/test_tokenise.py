"""Stage tokenise. Oracle: `pack` on the whole text."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dotmoe.common.progress import Progress
from dotmoe.text.config import DataConfig
from dotmoe.text.packing import pack
from dotmoe.text.sources import documents
from dotmoe.text.tokenise import OTHER, TokenisedText, require_sources, tokenise, write_windows


@pytest.fixture
def text(tmp_path):
    lines = [json.dumps({"text": f"{i}: the crow ate {i * 7 % 13} figs."}) for i in range(300)]
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture
def tokenised(dense, tmp_path, monkeypatch):
    """Runs the stage: the text, its record, and the lines that were printed."""

    def make(
        *data,
        eval_text=(),
        text_of_run=None,
        seq_len=32,
        blocks=30_000,
        eval_tokens=300,
        **options,
    ):
        lines, progress = [], Progress(quiet=True)
        monkeypatch.setattr(progress, "log", lines.append)
        config = DataConfig(data=data, seq_len=seq_len, **options)
        require_sources(config, eval_text)
        folder = tmp_path / "0_data"
        folder.mkdir(exist_ok=True)
        made = tokenise(
            config,
            dense,
            folder,
            blocks=blocks,
            eval_text=eval_text,
            eval_tokens=eval_tokens,
            progress=progress,
            text_of_run=text_of_run,
        )
        record = json.loads((folder / "data.json").read_text())
        files = {"training.safetensors", "heldout.safetensors", "data.json"}
        assert set(os.listdir(folder)) == files
        assert torch.equal(TokenisedText.load(folder).training.tokens_BT, made.training.tokens_BT)
        return SimpleNamespace(text=made, record=record, lines=lines)

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
    made = tokenised(text, text, eval_text=(other,), data_weights=(1.0, 1.0))
    expected = pack(documents(DataConfig(data=(other,))), dense.tokenizer, 256)[0]
    assert torch.equal(made.text.heldout.tokens_BT, expected[None])
    assert made.text.heldout_name == (other,)
    assert made.record["overlap"] == 0
    assert [each["share"] for each in made.record["training"]["sources"]] == [0.5, 0.5]
    assert not any("is training text" in line for line in made.lines)


@pytest.mark.parametrize("share", [1, 0.5])
def test_text_to_measure_on_that_is_training_text_is_named_so(share, text, tokenised, tmp_path):
    rows = Path(text).read_text().splitlines()
    mine = tmp_path / "mine.jsonl"
    mine.write_text("\n".join([*rows[: int(12 * share)], json.dumps({"text": "x" * 170})]))
    made = tokenised(text, eval_text=(str(mine),), seq_len=128)
    assert made.record["overlap"] == pytest.approx(share, abs=0.05)
    note = f"{made.record['overlap']:.2%} of it training text"
    assert made.text.heldout_name == (str(mine), note)
    assert any(line.endswith("is training text: results on it are no test") for line in made.lines)


def test_text_that_is_too_short_is_said_on_the_screen_and_in_the_record(
    text, heldout_file, tokenised, tmp_path
):
    rows = [{"text": "seven.."}, {"text": None}, {"text": " "}] * 50
    short = tmp_path / "short.jsonl"
    short.write_text("\n".join(map(json.dumps, rows)))
    made = tokenised(str(short), eval_text=(str(heldout_file),))
    used = 50 * (1 + len("seven.."))  # a token a byte, and <s>
    asked = 30_000 * 32
    assert (made.record["training"]["tokens"], made.record["training"]["asked"]) == (used, asked)
    assert made.lines[0] == f"training text: up to {asked:,} tokens are read"
    assert made.text.notes == (
        f"training text: {used:,} of {asked:,} tokens asked, because the data end there",
        f"training text: of the rows of {short}, 100 without text were left out, 50 documents used",
    )
    assert set(made.text.notes) <= set(made.lines)
    made = tokenised(text, eval_text=(str(heldout_file),), blocks=2, eval_tokens=256)
    assert made.text.notes == ()
    made = tokenised(text, eval_text=(str(short),), blocks=2, eval_tokens=10**6)
    assert made.text.notes[0].startswith(f"held-out text: {used:,} of 1,000,000 tokens asked")


def test_a_part_of_a_mix_that_ran_out_is_said(text, heldout_file, tokenised, tmp_path):
    short = tmp_path / "short.jsonl"
    short.write_text('{"text": "seven.."}\n' * 8)
    data, weights = (text, str(short)), (1.0, 1.0)
    made = tokenised(*data, eval_text=(str(heldout_file),), data_weights=weights, blocks=8)
    assert made.record["training"]["tokens"] == 8 * 32
    assert (
        made.text.notes[0] == f"training text: {short} ran out, at 25.0% of the tokens, not 50.0%"
    )


def test_beside_a_run_its_heldout_text_is_taken_with_its_name(text, heldout_file, tokenised):
    """Also where the training text is another."""
    source = tokenised(text).text
    heldout = source.heldout.tokens_BT.clone()
    made = tokenised(str(heldout_file), text_of_run=source)
    assert made.text.heldout_name == source.heldout_name
    assert torch.equal(made.text.heldout.tokens_BT, heldout)
    made = tokenised(text, text_of_run=source)
    assert made.record["left_out_blocks"] >= 9
    assert any("left out" in line for line in made.lines)


def test_another_text_that_is_training_text_is_said(dense, tmp_path, text):
    """Oracle: the same file as both."""
    data = DataConfig(data=(text,), seq_len=64)
    progress = Progress(quiet=True)
    write_windows((text,), data, dense, tmp_path / OTHER, 512, progress)
    made = tokenise(
        data, dense, tmp_path, blocks=40, eval_text=(), eval_tokens=256, progress=progress
    )
    (note,) = [note for note in made.notes if "other text is training text" in note]
    assert note.startswith("100.00%")
