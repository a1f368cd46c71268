"""STAGE tokenise: text, or samples of the dense model -> blocks to train on and to measure on."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from dotmoe.data import (
    SELF,
    DataConfig,
    PackedSources,
    TokenBlocks,
    documents,
    pack_sources,
    shares_in_words,
    sources_of,
    split_off_tail,
    write_decontaminated,
)
from dotmoe.files import read_json, write_json
from dotmoe.models.dense import DenseModel
from dotmoe.progress import Progress
from dotmoe.self_text import NOTE, SampleConfig, sample_blocks

_TRAINING, _HELDOUT, _RECORD = "training.safetensors", "heldout.safetensors", "data.json"
HELDOUT_FILES = (_HELDOUT, _RECORD)
"""Files in the stage's folder that say what to measure on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Blocks to train on, and blocks to measure on that are never trained on."""

    training: TokenBlocks
    heldout: TokenBlocks
    heldout_name: tuple[str, ...]
    """What to call the held-out text: its files, or where its blocks are from."""

    @classmethod
    def load(cls, folder: Path) -> Self:
        """What `tokenise` wrote, mapped into memory."""
        return cls(
            training=TokenBlocks.load(folder / _TRAINING),
            heldout=TokenBlocks.load(folder / _HELDOUT),
            heldout_name=tuple(read_json(folder / _RECORD)["heldout_name"]),
        )


def require_sources(data: DataConfig, eval_text: tuple[str, ...]) -> None:
    """Refuse texts that are not there, which is known before anything is loaded.

    Raises:
        UserError: A source of `data` or `eval_text` that cannot be used.
    """
    if not samples_itself(data):
        sources_of(data)
    if eval_text:
        documents(_in_order(data, eval_text))


def samples_itself(data: DataConfig) -> bool:
    """Whether the training text is sampled from the dense model."""
    return data.data == (SELF,)


def tokenise(
    data: DataConfig,
    sample: SampleConfig,
    dense: DenseModel,
    folder: Path,
    *,
    blocks: int,
    min_tokens: int = 0,
    eval_text: tuple[str, ...],
    eval_tokens: int,
    progress: Progress,
    beside: Text | None = None,
) -> Text:
    """Write blocks of training and held-out text, and a record of both.

    Args:
        data: Sources, and the block length; lowered to the model's context.
        sample: How to sample where the source is the model itself.
        dense: Its tokenizer is used, and the model where the text is sampled from it.
        folder: Where to write.
        blocks: Of training text, at most.
        min_tokens: Of training text, if `blocks` are fewer.
        eval_text: Sources of the held-out text. Default: that of `beside`, else the last blocks of
            the training text.
        eval_tokens: Tokens of `eval_text`, or of the last blocks, at most.
        progress: Shows bars and, of several sources, the shares reached.
        beside: Text of the run that is finetuned: blocks that are part of the held-out text are
            then left out of training.

    Raises:
        UserError: A source that cannot be read, too little text, or no room.
    """
    seq_len = min(data.seq_len, dense.widths.context)
    if seq_len < data.seq_len:
        progress.log(f"seq_len lowered to {seq_len}: the model has no longer context")
    data = replace(data, seq_len=seq_len)
    tokens = max(blocks * seq_len, min_tokens)
    if samples_itself(data):
        tokens = min(tokens, sample.sample_tokens or tokens)
    training_file, heldout_file = folder / _TRAINING, folder / _HELDOUT
    record: dict[str, Any] = {"heldout": "the last blocks of the same text"}
    origin = NOTE if samples_itself(data) else "the data"
    name: tuple[str, ...] = (f"blocks of {origin} kept out of training",)
    if eval_text:
        name = eval_text
        record["heldout"] = _heldout_text(
            data, dense, heldout_file, eval_text, eval_tokens, progress
        )
    elif beside is not None:
        name = beside.heldout_name
        record["heldout"] = "that of the run that is finetuned"
        beside.heldout.save(heldout_file)
    if beside is not None:
        heldout = TokenBlocks.load(heldout_file)
        whole_file = folder / "whole.safetensors"
        # Some of the held-out text may be part of the source, and is left out.
        whole = _training_text(
            data, sample, dense, whole_file, tokens + heldout.num_tokens, progress
        )
        left_out = write_decontaminated(whole.blocks, heldout, training_file)
        if left_out:
            progress.log(
                f"{left_out} of {whole.blocks.num_blocks} blocks of training text left out: they "
                "are part of the held-out text"
            )
        whole_file.unlink()
        record |= {"training": whole.record, "left_out_blocks": left_out}
    else:
        tail = 0 if eval_text else eval_tokens
        text = _training_text(data, sample, dense, training_file, tokens + tail, progress)
        record["training"] = text.record
        if tail:
            split_off_tail(training_file, heldout_file, tail)
    write_json(folder / _RECORD, {**record, "heldout_name": name})
    return Text.load(folder)


def _training_text(
    data: DataConfig,
    sample: SampleConfig,
    dense: DenseModel,
    file: Path,
    tokens: int,
    progress: Progress,
) -> PackedSources:
    if samples_itself(data):
        with progress.bar("sample from the dense model") as update:
            return sample_blocks(
                dense,
                sample,
                file,
                seq_len=data.seq_len,
                num_tokens=tokens,
                seed=data.data_seed,
                on_progress=lambda done: update(min(done, tokens), tokens),
            )
    with progress.bar("tokenise") as update:
        text = pack_sources(
            data, dense.tokenizer, file, tokens, on_progress=lambda done: update(done, tokens)
        )
    if len(text.record["sources"]) > 1:
        progress.log(shares_in_words(text.record))
    return text


def _heldout_text(
    data: DataConfig,
    dense: DenseModel,
    file: Path,
    eval_text: tuple[str, ...],
    tokens: int,
    progress: Progress,
) -> dict[str, Any]:
    """Write blocks of `eval_text`, in windows of 2048 tokens or the model's context."""
    window = min(2048, dense.widths.context)
    with progress.bar("tokenise") as update:
        return pack_sources(
            replace(_in_order(data, eval_text), seq_len=window),
            dense.tokenizer,
            file,
            tokens,
            on_progress=lambda done: update(done, tokens),
            remedy="Give more eval_text and eval_tokens, or no eval_text.",
        ).record


def _in_order(data: DataConfig, sources: tuple[str, ...]) -> DataConfig:
    """Other sources, read in their own order."""
    return replace(data, data=sources, data_weights=(), data_epochs=1, shuffle_buffer=0)
