"""Stage tokenise: text -> training blocks and held-out blocks."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from dotmoe.common.files import read_json, write_json
from dotmoe.common.progress import Progress
from dotmoe.models.family import DenseModel
from dotmoe.text.blocks import (
    Record,
    TokenBlocks,
    overlap,
    pack_sources,
    split_off_tail,
    write_decontaminated,
)
from dotmoe.text.config import DataConfig
from dotmoe.text.sources import documents, sources_of

_TRAINING, _HELDOUT, _RECORD = "training.safetensors", "heldout.safetensors", "data.json"
OTHER = "other.safetensors"
"""File with blocks of a second text to evaluate on, in the stage's folder."""
_READ_FOR_ONE = 8
"""Tokens read per token drawn from the text: the first documents alone may share one topic."""
_TOLD = {"training": "training text", "heldout": "held-out text"}
HELDOUT_FILES = (_HELDOUT, _RECORD)
"""Files in the stage's folder that hold and describe the held-out text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Training blocks, and held-out blocks that are never trained on."""

    training: TokenBlocks
    heldout: TokenBlocks
    heldout_name: tuple[str, ...]
    """Name of the held-out text: its files, or a description of where its blocks come from."""
    notes: tuple[str, ...]
    """What of the text that was asked for is missing; see `notes_on`."""

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Map what `tokenise` wrote into memory."""
        record = read_json(folder / _RECORD)
        return cls(
            training=TokenBlocks.load(folder / _TRAINING),
            heldout=TokenBlocks.load(folder / _HELDOUT),
            heldout_name=tuple(record["heldout_name"]),
            notes=notes_on(record),
        )


def notes_on(record: Record) -> tuple[str, ...]:
    """Sentences on how the texts of a stage's record fall short of what was asked."""
    notes = list[str]()
    for key, what in _TOLD.items():
        if isinstance(packed := record.get(key), dict):
            notes += _shortfalls(packed, what)
    return tuple(notes)


def _shortfalls(packed: Record, what: str) -> list[str]:
    """Sentences on one text: too few tokens, too few of a part of a mix, rows without text."""
    notes = list[str]()
    tokens, asked = packed["tokens"], packed.get("asked", 0)  # not in older records
    if tokens < asked:
        notes.append(f"{what}: {tokens:,} of {asked:,} tokens asked, because the data end there")
    for source in packed["sources"]:
        if source["weight"] and source["ran_out"]:
            given, wanted = f"{source['share']:.1%}", f"{source['weight']:.1%}"
            notes.append(
                f"{what}: {source['name']} ran out, at {given} of the tokens, not {wanted}"
            )
        if empty := source.get("without_text"):
            read = f"{empty:,} without text were left out, {source['documents']:,} documents used"
            notes.append(f"{what}: of the rows of {source['name']}, {read}")
    return notes


def tokens_to_read(trained: int, drawn: int) -> int:
    """Tokens of training text that a run reads: for steps on `trained` and `drawn` from the whole.

    What is drawn evenly from a text is drawn from more of it.
    """
    return max(trained, _READ_FOR_ONE * drawn)


def require_sources(data: DataConfig, eval_text: tuple[str, ...]) -> None:
    """Raise `UserError` for sources that do not exist, before anything is loaded."""
    sources_of(data)
    if eval_text:
        documents(_in_order(data, eval_text))


def tokenise(
    data: DataConfig,
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
    """Write blocks of training and held-out text, and a record of both, into the stage's folder.

    `blocks` blocks of training text are read, or more if calibration and repair need `min_tokens`
    tokens drawn evenly from the whole. The block length is at most the model's context.

    The held-out text, at most `eval_tokens` tokens, is `eval_text`; else that of `beside`, the text
    of the run that is finetuned; else the last training blocks. With `beside`, blocks that are part
    of the held-out text are left out of training. Raises `UserError` if a source cannot be read, or
    there is too little text or disk space. A share of `eval_text` that is training text, also that
    of `beside`, is printed, recorded as `overlap`, and part of the name of the held-out text.
    """
    if data.seq_len > dense.widths.context:
        data = replace(data, seq_len=dense.widths.context)
        progress.log(f"seq_len lowered to {data.seq_len}, the context of the model")
    tokens = tokens_to_read(blocks * data.seq_len, min_tokens)
    progress.log(f"training text: up to {tokens:,} tokens are read")
    training, heldout, whole = (folder / name for name in (_TRAINING, _HELDOUT, "whole"))
    record: Record = {}
    if eval_text:
        name = eval_text
        windows = _windows(eval_text, data, dense)
        record["heldout"] = _packed(windows, dense, heldout, eval_tokens, progress)
    elif beside is not None:
        name = beside.heldout_name
        record["heldout"] = "that of the run that is finetuned"
        beside.heldout.save(heldout)
    else:
        name = ("blocks of the data kept out of training",)
        record["heldout"] = "the last blocks of the same text"
        record["training"] = _packed(data, dense, training, tokens + eval_tokens, progress)
        split_off_tail(training, heldout, eval_tokens)
    if beside is not None:
        # The source may contain some of the held-out text, which is left out below.
        avoided = TokenBlocks.load(heldout)
        record["training"] = _packed(data, dense, whole, tokens + avoided.num_tokens, progress)
        record["left_out_blocks"] = left_out = write_decontaminated(
            TokenBlocks.load(whole), avoided, training
        )
        whole.unlink()
        if left_out:
            progress.log(
                f"{left_out} blocks of training text left out: they are part of the held-out text"
            )
    elif eval_text:
        record["training"] = _packed(data, dense, training, tokens, progress)
    if eval_text:
        fitted = [TokenBlocks.load(training), *([beside.training] if beside else [])]
        record["overlap"] = max(overlap(blocks, TokenBlocks.load(heldout)) for blocks in fitted)
        if share := record["overlap"]:
            told = f"{share:.2%} of {', '.join(name)} is training text: results on it are no test"
            progress.log(told)
            name = (*name, f"{share:.2%} of it training text")
    for note in notes_on(record):
        progress.log(note)
    write_json(folder / _RECORD, {**record, "heldout_name": name})
    return Text.load(folder)


def write_windows(
    sources: tuple[str, ...],
    data: DataConfig,
    dense: DenseModel,
    path: Path,
    tokens: int,
    progress: Progress,
) -> Record:
    """Write blocks of a second text to evaluate on; returns their record, raises as `tokenise`."""
    record = _packed(_windows(sources, data, dense), dense, path, tokens, progress)
    for note in _shortfalls(record, "other text"):
        progress.log(note)
    return record


def _windows(sources: tuple[str, ...], data: DataConfig, dense: DenseModel) -> DataConfig:
    """The config of a text to evaluate on."""
    return replace(_in_order(data, sources), seq_len=min(2048, dense.widths.context))


def _packed(
    data: DataConfig, dense: DenseModel, path: Path, tokens: int, progress: Progress
) -> Record:
    with progress.bar("tokenise", tokens=1) as update:
        return pack_sources(data, dense.tokenizer, path, tokens, update)


def _in_order(data: DataConfig, sources: tuple[str, ...]) -> DataConfig:
    """The config with other sources, read in their own order."""
    return replace(data, data=sources, data_weights=(), shuffle_buffer=0)
