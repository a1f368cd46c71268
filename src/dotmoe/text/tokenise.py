"""Stage tokenise: text -> training blocks and held-out blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from dotmoe.common.errors import UserError
from dotmoe.common.files import read_json, write_json
from dotmoe.common.numbers import ceil_div
from dotmoe.common.progress import Progress
from dotmoe.models.chat import by_template
from dotmoe.models.dense_model import DenseModel
from dotmoe.text.answers import Answer, OwnAnswers, num_answer_tokens, num_chat_tokens
from dotmoe.text.blocks import TokenBlocks, split_off_tail
from dotmoe.text.config import DataConfig, asks
from dotmoe.text.overlap import contained, overlap, write_decontaminated
from dotmoe.text.packing import Record, pack_sources, separator_id
from dotmoe.text.questions import ONE_HELDOUT_IN
from dotmoe.text.sources import documents, sources_of, text_of
from dotmoe.text.whole_chats import whole_chats

_TRAINING, _HELDOUT, _RECORD = "training.safetensors", "heldout.safetensors", "data.json"
OTHER = "other.safetensors"
"""File with blocks of a second text to evaluate on, in the stage's folder."""
_READ_FOR_ONE = 8
"""Tokens read per token drawn from the text: the first documents alone may share one topic."""
_BOILERPLATE = 0.01
_TEXT_NAMES = {"training": "training text", "heldout": "held-out text"}
NO_ANSWERS = OwnAnswers()
"""Of a run that asks nothing."""
MOST_OWN_TOKENS = 10_000_000
"""Most own answers that are written without being asked for: with more, the model would write for
days what the recipes of the paper read."""
HELDOUT_FILES = (_HELDOUT, _RECORD)
"""Files in the stage's folder that hold and describe the held-out text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenisedText:
    """Training blocks, and held-out blocks that are never trained on."""

    training: TokenBlocks
    heldout: TokenBlocks
    heldout_name: tuple[str, ...]
    """Name of the held-out text: its files, or a description of where its blocks come from."""
    other: TokenBlocks | None
    """The second text to measure on; None if there is none."""
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
            other=TokenBlocks.load(folder / OTHER) if (folder / OTHER).exists() else None,
            notes=notes_on(record),
        )


def notes_on(record: Record) -> tuple[str, ...]:
    """Sentences on how the texts of a stage's record fall short of what was asked."""
    notes = list[str]()
    for key, what in _TEXT_NAMES.items():
        if isinstance(packed := record.get(key), dict):
            notes += _shortfalls(packed, what)
    other = record.get("other_overlap", 0.0)  # nor this nor the next in older records
    if other >= _BOILERPLATE:
        notes.append(f"{other:.2%} of the other text is training text: results on it are no test")
    trained = record.get("trained_answers", 0)
    if trained:
        notes.append(
            f"{trained} held-out answers are in the training text: results on them are no test"
        )
    return tuple(notes)


def _shortfalls(packed: Record, what: str) -> list[str]:
    """Sentences on one text: too few tokens, too few of a part of a mix, rows without text."""
    notes = list[str]()
    tokens, asked = packed["tokens"], packed.get("asked", 0)  # not in older records
    if tokens < asked:
        notes.append(f"{what}: {tokens:,} of {asked:,} tokens asked, because the data end there")
    if short := packed.get("too_short"):
        notes.append(
            f"{what}: {short:,} tokens of text beside own answers are left out, too few for a "
            f"block of {packed['seq_len']:,}"
        )
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
    if text_of(data).data or not data.data:
        sources_of(text_of(data))
    if eval_text:
        documents(_in_order(data, eval_text))  # reads nothing yet, but refuses missing sources


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
    text_of_run: TokenisedText | None = None,
    own: OwnAnswers = NO_ANSWERS,
) -> TokenisedText:
    """Write blocks of training and held-out text, and a record of both, into the stage's folder.

    `blocks` blocks of training text are read, or more if calibration and repair need `min_tokens`
    tokens drawn evenly from the whole. The block length is at most the model's context. With `own`
    answers to fit to, the training text is these, and as many tokens of the other sources.

    The held-out text, at most `eval_tokens` tokens, is `eval_text`; else that of `text_of_run`, the
    text of the run that is finetuned; else the last training blocks. With `text_of_run`, blocks
    that are part of the held-out text are left out of training. A share of `eval_text` that is
    training text, also that of `text_of_run`, is printed, recorded as `overlap`, and part of the
    name of the held-out text. Raises `UserError` if a source cannot be read, or there is too
    little text or disk space.
    """
    data = _in_context(data, dense, progress)
    tokens = tokens_to_read(blocks * data.seq_len, min_tokens)
    if not own.fitted:
        progress.log(f"training text: up to {tokens:,} tokens are read")
    stage = _Stage(data, own, dense, folder, tokens, text_of_run, progress)
    heldout_name, record = stage.write_texts(eval_text, eval_tokens)
    is_heldout_here = bool(eval_text) or (text_of_run is None and not own.fitted)
    if is_heldout_here:
        record["overlap"] = stage.share_trained_on(_HELDOUT)
        heldout_name = _with_overlap(heldout_name, record["overlap"], progress)
    record["trained_answers"] = _trained_answers(own, dense.tokenizer, folder)
    record["other_overlap"] = stage.share_trained_on(OTHER)
    for note in notes_on(record):
        progress.log(note)
    write_json(folder / _RECORD, {**record, "heldout_name": heldout_name})
    return TokenisedText.load(folder)


@dataclass(frozen=True, slots=True)
class _Stage:
    """What one run of the stage reads, and the folder that it writes into."""

    data: DataConfig
    own: OwnAnswers
    dense: DenseModel
    folder: Path
    tokens: int
    """Tokens of training text to read."""
    text_of_run: TokenisedText | None
    progress: Progress

    def write_texts(
        self, eval_text: tuple[str, ...], eval_tokens: int
    ) -> tuple[tuple[str, ...], Record]:
        """Write held-out and training text; returns the name of the former, a record of both."""
        if eval_text:
            heldout = self._windows_of(eval_text, eval_tokens)
            return eval_text, {"heldout": heldout} | self._training_beside_heldout()
        if self.text_of_run is not None:
            self.text_of_run.heldout.save(self.folder / _HELDOUT)
            heldout = {"heldout": "that of the run that is finetuned"}
            return self.text_of_run.heldout_name, heldout | self._training_beside_heldout()
        name = ("blocks of the data kept out of training",)
        return name, self._split_in_two(eval_tokens)

    def _windows_of(self, eval_text: tuple[str, ...], eval_tokens: int) -> Record:
        """Write the held-out text that is given; returns its record."""
        windows = _windows(eval_text, self.data, self.dense)
        return _packed(windows, self.dense, self.folder / _HELDOUT, eval_tokens, self.progress)

    def _training_beside_heldout(self) -> Record:
        """Write training text where the held-out text is written; returns a record of it."""
        if self.text_of_run is not None:
            return self._without_heldout()
        return {"training": self._fitted(self.folder / _TRAINING, self.tokens)}

    def _split_in_two(self, eval_tokens: int) -> Record:
        """Write the text to fit to, its last blocks as held-out text; returns a record of both."""
        training = self.folder / _TRAINING
        record = self._fitted(training, self.tokens + eval_tokens)
        kept_out = _kept_out(self.data, self.own, record, eval_tokens)
        split_off_tail(training, self.folder / _HELDOUT, kept_out)
        return {"heldout": "the last blocks of the same text", "training": record}

    def _without_heldout(self) -> Record:
        """Write the text to fit to, without blocks of the held-out text that its sources contain.

        As many tokens more are read as the held-out text has. Returns a record of what is read, and
        the number of blocks that are left out.
        """
        whole = self.folder / "whole"
        heldout = TokenBlocks.load(self.folder / _HELDOUT)
        record = self._fitted(whole, self.tokens + heldout.num_tokens)
        separator = separator_id(self.dense.tokenizer)
        blocks = TokenBlocks.load(whole)
        left_out = write_decontaminated(blocks, heldout, self.folder / _TRAINING, separator)
        whole.unlink()
        if left_out:
            self.progress.log(
                f"{left_out} blocks of training text left out: they are part of the held-out text"
            )
        return {"training": record, "left_out_blocks": left_out}

    def share_trained_on(self, name: str) -> float:
        """Share of a text that is training text, also that of the run that is finetuned.

        0 if there is no file of that name.
        """
        file = self.folder / name
        if not file.exists():
            return 0.0
        separator = separator_id(self.dense.tokenizer)
        heldout = TokenBlocks.load(file)
        share = overlap(TokenBlocks.load(self.folder / _TRAINING), heldout, separator)
        if self.text_of_run is None:
            return share
        return max(share, overlap(self.text_of_run.training, heldout, separator))

    def _fitted(self, path: Path, tokens: int) -> Record:
        """Write blocks of the text to fit to: of sources, at most `tokens`; with own answers, both.

        Blocks of chats and blocks of text are spread evenly, so that any part has both.
        """
        text = text_of(self.data)
        if not self.own.fitted:
            return _packed(text, self.dense, path, tokens, self.progress)
        chats = TokenBlocks(*whole_chats(self.own.fitted, self.data.seq_len))
        record = _record_of_chats(self.own, chats)
        if not text.data:
            chats.save(path)
            return record
        of_text = path.with_name(f"{path.name}.text")
        wanted = text_beside(self.data, chats.num_tokens)
        packed = _packed(text, self.dense, of_text, wanted, self.progress, answered=True)
        texts = TokenBlocks.load(of_text)
        of_text.unlink()
        if not texts.num_blocks:  # the rows may all ask
            chats.save(path)
            return {**record, "too_short": packed["tokens"]}
        _spread(chats, texts).save(path)
        total = chats.num_tokens + texts.num_tokens
        sources = record["sources"] + packed["sources"]
        for source in sources:
            source["share"] = source["tokens"] / total
        asked = record.get("asked", chats.num_tokens) + wanted
        return {**packed, "tokens": total, "asked": asked, "sources": sources}


def _in_context(data: DataConfig, dense: DenseModel, progress: Progress) -> DataConfig:
    """The config with blocks that are no longer than the context of the model."""
    if data.seq_len <= dense.widths.context:
        return data
    progress.log(f"seq_len lowered to {dense.widths.context}, the context of the model")
    return replace(data, seq_len=dense.widths.context)


def _trained_answers(own: OwnAnswers, tokenizer: Any, folder: Path) -> int:
    """Number of held-out answers whose end stands in the training text.

    An answer is searched for by its ids as they were drawn, and as a text of its words has them.
    """
    answers = (*own.alike, *own.others)
    if not answers:
        return 0
    training = TokenBlocks.load(folder / _TRAINING)
    drawn = contained(training, [answer.ids for answer in answers])
    read = contained(training, [_ids_in_text(answer, tokenizer) for answer in answers])
    return int((drawn | read).sum())


def _ids_in_text(answer: Answer, tokenizer: Any) -> Sequence[int]:
    """Token ids of an answered chat that is read as text."""
    try:
        written = by_template(tokenizer, answer.messages, refusal="an answer has", remedy="")
    except UserError:  # no text has it either
        return answer.ids
    ids: list[int] = tokenizer(written, add_special_tokens=False).input_ids
    return ids


def _with_overlap(name: tuple[str, ...], share: float, progress: Progress) -> tuple[str, ...]:
    """The name of held-out text, with the share of it that is training text, if any is.

    Less than a hundredth is boilerplate, such as licences.
    """
    if share < _BOILERPLATE:
        return name
    progress.log(f"{share:.2%} of {', '.join(name)} is training text: results on it are no test")
    return (*name, f"{share:.2%} of it training text")


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


def _record_of_chats(own: OwnAnswers, chats: TokenBlocks) -> Record:
    """The record of a text of own answers alone; `asked` where they are fewer than that."""
    record: Record = {
        "tokens": chats.num_tokens,
        "seq_len": chats.seq_len,
        "sources": [_of_answers(own, chats)],
    }
    if num_chat_tokens(own.fitted) < own.wanted_tokens:
        record["asked"] = own.wanted_tokens
    return record


def _of_answers(own: OwnAnswers, chats: TokenBlocks) -> Record:
    """The record of own answers as a source."""
    return {
        "name": "own answers",
        "weight": None,
        "share": 1.0,
        "tokens": chats.num_tokens,
        "documents": len(own.fitted),
        "answer_tokens": num_answer_tokens(own.fitted),
        "finished": sum(answer.finished for answer in own.fitted),
    }


def _kept_out(data: DataConfig, own: OwnAnswers, training: Record, eval_tokens: int) -> int:
    """Tokens of the text to fit to that are kept out to measure perplexity on.

    Of own answers alone it is at most one in eight: they are dear, and others are held out.
    """
    if not own.fitted or text_of(data).data:
        return eval_tokens
    return min(eval_tokens, int(training["tokens"]) // ONE_HELDOUT_IN)


def own_tokens_for(data: DataConfig, fitted: int, eval_tokens: int, *, has_heldout: bool) -> int:
    """Tokens of own answers to write for a fit that reads `fitted` of its text.

    Without other text, and unless the run has held-out text already, one in eight is kept out to
    measure perplexity on, at most `eval_tokens`.
    """
    if has_heldout or text_of(data).data:
        return fitted
    return fitted + min(eval_tokens, ceil_div(fitted, ONE_HELDOUT_IN - 1))


def text_beside(data: DataConfig, chats: int) -> int:
    """Tokens of text beside so many of own answers: as the weights say, else as many."""
    if not text_of(data).data:
        return 0
    return max(data.seq_len, round(_text_per_chat(data) * chats))


def _text_per_chat(data: DataConfig) -> float:
    """Tokens of text for each token of own answers: as the weights say, else 1."""
    if not data.data_weights:
        return 1.0
    pairs = list(zip(data.data, data.data_weights, strict=True))
    asking = sum(w for name, w in pairs if asks(name))
    of_text = sum(w for _, w in pairs) - asking
    return of_text / asking if asking else 1.0


def _spread(chats: TokenBlocks, texts: TokenBlocks) -> TokenBlocks:
    """Both kinds of blocks, each at equal distances over the whole; every token of text counts."""
    places = [torch.arange(1, 2 * each.num_blocks, 2) / each.num_blocks for each in (chats, texts)]
    order_B = torch.cat(places).argsort(stable=True)
    marks_BT = torch.ones(texts.tokens_BT.shape, dtype=torch.bool)
    assert chats.is_answer_BT is not None, "chats are marked"
    return TokenBlocks(
        torch.cat([chats.tokens_BT, texts.tokens_BT])[order_B],
        torch.cat([chats.is_answer_BT, marks_BT])[order_B],
    )


def _packed(
    data: DataConfig,
    dense: DenseModel,
    path: Path,
    tokens: int,
    progress: Progress,
    *,
    answered: bool = False,
) -> Record:
    with progress.bar("tokenise", tokens=1) as update:
        return pack_sources(data, dense.tokenizer, path, tokens, update, answered=answered)


def _in_order(data: DataConfig, sources: tuple[str, ...]) -> DataConfig:
    """The config with other sources, read in their own order."""
    return replace(data, data=sources, data_weights=(), shuffle_buffer=0)
