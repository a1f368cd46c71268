"""Stage tokenise: text, or samples of the dense model -> blocks to train on and to measure on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from dotmoe.artifacts import DenseModel
from dotmoe.config import RunConfig
from dotmoe.data import (
    SELF,
    DataConfig,
    PackedSources,
    TokenBlocks,
    documents,
    pack_sources,
    shares_in_words,
    sources_of,
)
from dotmoe.narration import Narrator
from dotmoe.self_text import NOTE, SampleConfig, sample_blocks

RECORD_FILE = "data.json"
"""Where the record of `tokenise` is written, beside the blocks."""


def block_files(folder: Path) -> tuple[Path, Path]:
    """Files of the training and of the held-out blocks in a folder."""
    return folder / "training.safetensors", folder / "heldout.safetensors"


def require_sources(config: RunConfig) -> None:
    """Refuse texts that are not there, which is known before anything is loaded.

    Raises:
        UserError: A source of `data` or `eval_text` that cannot be used.
    """
    if not samples_itself(config.data):
        sources_of(config.data)
    if config.eval_text:
        documents(_plain(config.data, config.eval_text))


def samples_itself(config: DataConfig) -> bool:
    """Whether the training text is sampled from the dense model."""
    return config.data == (SELF,)


def measured_on(config: RunConfig) -> tuple[str, ...]:
    """What to call the held-out text."""
    if config.eval_text:
        return config.eval_text
    origin = NOTE if samples_itself(config.data) else "the data"
    return (f"blocks of {origin} kept out of training",)


def tokenise(
    config: RunConfig, dense: DenseModel, folder: Path, narrator: Narrator
) -> dict[str, Any]:
    """Write the files of `block_files`.

    Args:
        config: Sources, block length, and how many tokens the later stages need.
        dense: Its tokenizer is used, and the model itself where the text is sampled from it.
        folder: Where to write. Without `eval_text` it takes twice the room for a moment.
        narrator: Shows the progress and, of several sources, the shares reached.

    Returns:
        The record of both texts, for `RECORD_FILE`.

    Raises:
        UserError: A source that cannot be read, too little text, or no room.
    """
    seq_len = min(config.data.seq_len, dense.widths.context)
    if seq_len < config.data.seq_len:
        narrator.say(f"seq_len lowered to {seq_len}: the model has no longer context")
    step_tokens = config.align.steps * config.align.batch_size * seq_len
    wanted = max(step_tokens, config.calibrate.calibration_tokens)
    if samples_itself(config.data):
        wanted = min(wanted, config.sample.sample_tokens or wanted)
    source = replace(config.data, seq_len=seq_len)
    training, heldout = block_files(folder)
    if config.eval_text:
        measured = heldout_text(config, dense, heldout, narrator)
        text = training_text(source, config.sample, dense, training, wanted, narrator)
        return {"training": text.record, "heldout": measured.record}
    whole = folder / "whole.safetensors"
    wanted += config.eval_tokens
    text = training_text(source, config.sample, dense, whole, wanted, narrator)
    parts = text.blocks.without_tail(config.eval_tokens)
    for part, file in zip(parts, (training, heldout), strict=True):
        part.save(file)
    whole.unlink()
    return {"training": text.record, "heldout": "the last blocks of the same text"}


def load_blocks(folder: Path) -> tuple[TokenBlocks, TokenBlocks]:
    """Training and held-out blocks that `tokenise` wrote, mapped into memory."""
    training, heldout = block_files(folder)
    return TokenBlocks.load(training), TokenBlocks.load(heldout)


def training_text(
    source: DataConfig,
    sample: SampleConfig,
    dense: DenseModel,
    file: Path,
    tokens: int,
    narrator: Narrator,
) -> PackedSources:
    """Blocks of the sources, or sampled from the dense model, written to a file.

    Args:
        source: What to read, and the block length.
        sample: How to sample where the source is the model itself.
        dense: The model and its tokenizer.
        file: To write.
        tokens: Wanted, at most.
        narrator: Shows the progress.
    """
    if samples_itself(source):
        with narrator.bar("sample from the dense model") as update:
            return sample_blocks(
                dense,
                sample,
                file,
                seq_len=source.seq_len,
                num_tokens=tokens,
                seed=source.data_seed,
                on_progress=lambda done: update(min(done, tokens), tokens),
            )
    with narrator.bar("tokenise") as update:
        text = pack_sources(
            source, dense.tokenizer, file, tokens, on_progress=lambda done: update(done, tokens)
        )
    if len(text.record["sources"]) > 1:
        narrator.say(shares_in_words(text.record))
    return text


def heldout_text(
    config: RunConfig, dense: DenseModel, file: Path, narrator: Narrator
) -> PackedSources:
    """Blocks of `eval_text`, in windows of 2048 tokens or the model's context."""
    window = min(2048, dense.widths.context)
    source = replace(_plain(config.data, config.eval_text), seq_len=window)
    remedy = "Give more eval_text and eval_tokens, or no eval_text."
    tokens = config.eval_tokens
    with narrator.bar("tokenise") as update:
        return pack_sources(
            source,
            dense.tokenizer,
            file,
            tokens,
            on_progress=lambda done: update(done, tokens),
            remedy=remedy,
        )


def _plain(config: DataConfig, sources: tuple[str, ...]) -> DataConfig:
    """Other sources, read in their own order."""
    return replace(config, data=sources, data_weights=(), shuffle_buffer=0)
