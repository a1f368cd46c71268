"""Documents -> tokens joined end to end, of one source or of many by their shares."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dotmoe.data.blocks import BlockWriter, TokenBlocks
from dotmoe.data.files import Continuation, cut
from dotmoe.data.sources import DataConfig, opened, sources_of
from dotmoe.errors import UserError

MORE_TEXT = "Give more text, or lower seq_len."
"""What to do about a text that fills no block."""

_BATCH_CHARACTERS = 1 << 18
_BATCH_PIECES = 256
_TOLD_EVERY = 1 << 16

TextRecord = dict[str, Any]
"""What is written beside blocks about the text in them; see `pack_sources`."""


class Piece(NamedTuple):
    """A document, or a part of a long one, as token ids without separators."""

    ids: list[int]
    is_start: bool
    """Whether a document begins here."""
    num_bytes: int
    """Of its text in UTF-8."""


class Packed(NamedTuple):
    """Token ids of documents joined end to end."""

    tokens: Tensor
    """int32, one dimension."""
    tokens_per_byte: float
    """Of the same text, separators counted as tokens: turns nats a token into bits a byte."""


def pack(
    documents: Iterable[str],
    tokenizer: Any,
    max_tokens: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Packed:
    """Tokenise documents and join them: this packing is used for training and for perplexity.

    Each document is preceded by the BOS token; where the tokenizer has none it is followed by EOS;
    where it has neither, nothing is put between. A document longer than 64k characters is
    tokenised in pieces cut at line ends.

    Args:
        documents: Texts; a `Continuation` goes on with the document before it. Read no further
            than `max_tokens` needs.
        tokenizer: A Hugging Face tokenizer.
        max_tokens: Stop there, in the midst of a document if need be.
        on_progress: Told the number of tokens so far, after each batch of documents.

    Raises:
        UserError: The documents hold no text.
    """
    tokens = array("i")
    num_bytes = num_tokens = 0
    for batch in tokenised(documents, tokenizer):
        for piece in batch:
            if piece.is_start:
                tokens.extend(separator(tokenizer, has_previous=num_bytes > 0))
            tokens.extend(piece.ids)
            num_bytes += piece.num_bytes
        num_tokens = len(tokens)
        if on_progress is not None:
            on_progress(num_tokens if max_tokens is None else min(num_tokens, max_tokens))
        if max_tokens is not None and num_tokens >= max_tokens:
            del tokens[max_tokens:]
            break
    else:
        tokens.extend(end_of_document(tokenizer, has_previous=num_bytes > 0))
        num_tokens = len(tokens)
    if not tokens:
        raise UserError("the data holds no text. Name sources with text in them.")
    return Packed(torch.frombuffer(tokens, dtype=torch.int32), num_tokens / num_bytes)


def tokenised(documents: Iterable[str], tokenizer: Any) -> Iterator[list[Piece]]:
    """Pieces of documents as token ids, some hundred at a time; empty documents leave no trace."""
    for batch in _batches(documents):
        encoded = tokenizer(
            [piece for piece, _ in batch],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # a piece may be longer than the model's context
        )["input_ids"]
        yield [
            Piece(ids, is_start, len(piece.encode()))
            for ids, (piece, is_start) in zip(encoded, batch, strict=True)
        ]


def separator(tokenizer: Any, *, has_previous: bool) -> list[int]:
    """Tokens that go before a document.

    Args:
        tokenizer: A Hugging Face tokenizer.
        has_previous: Whether another document goes before it.
    """
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return [*end_of_document(tokenizer, has_previous=has_previous), *start]


def end_of_document(tokenizer: Any, *, has_previous: bool) -> list[int]:
    """EOS where the tokenizer has no BOS and there is a document to end, else nothing."""
    closed_by_eos = tokenizer.bos_token_id is None and tokenizer.eos_token_id is not None
    return [tokenizer.eos_token_id] if has_previous and closed_by_eos else []


def separator_of(tokenizer: Any) -> str:
    """How documents are separated by this tokenizer, in words."""
    if tokenizer.bos_token_id is not None:
        return f"{tokenizer.bos_token} before each"
    if tokenizer.eos_token_id is not None:
        return f"{tokenizer.eos_token} after each"
    return "nothing between them"


# --- many sources --------------------------------------------------------------------------


class PackedSources(NamedTuple):
    """Blocks on disk and where their tokens come from."""

    blocks: TokenBlocks
    record: TextRecord


class Reading:
    """A source under way: its pieces as token ids, and what was taken from it so far."""

    def __init__(self, name: str, weight: float | None, config: DataConfig, tokenizer: Any) -> None:
        self.name = name
        self.weight = weight
        self.num_tokens = 0
        self.num_documents = 0
        self.passes = 0
        self.ran_out = False
        self._config = config
        self._tokenizer = tokenizer
        self._stream = self._pieces()

    def next_piece(self) -> Piece | None:
        """The piece after the last; None when the source has been read as often as allowed."""
        piece = next(self._stream, None)
        self.ran_out = piece is None
        return piece

    def record(self, all_tokens: int) -> TextRecord:
        """What came of it."""
        return {
            "name": self.name,
            "weight": self.weight,
            "share": self.num_tokens / all_tokens,
            "tokens": self.num_tokens,
            "documents": self.num_documents,
            "passes": self.passes,
            "ran_out": self.ran_out,
        }

    def _pieces(self) -> Iterator[Piece]:
        # Read in order, sources are read once: alignment repeats the blocks themselves.
        allowed = 1 if self.weight is None else self._config.data_epochs
        while self.passes < allowed:
            texts = opened(self.name, self._config, self.passes)
            self.passes += 1
            for batch in tokenised(texts, self._tokenizer):
                yield from batch


def mixed(readings: Sequence[Reading], tokenizer: Any) -> Iterator[tuple[Reading, list[int]]]:
    """Token ids of piece after piece with their separators, and the source of each.

    With weights, the next piece is always of the source whose tokens, divided by its weight, are
    fewest. With w_i the weight of source i, s_i its longest piece and T tokens so far, its tokens
    are then between w_i T - w_i (s_1 + ... + s_n) and w_i T + s_i at every moment while no source
    has run out. A source that has run out leaves the others in their proportions. Without weights,
    one source is read after the other.

    A document of more than 64k characters comes in pieces; where those of another source come
    between, the rest of it counts as a document of its own.
    """
    waiting = list(readings)
    last: Reading | None = None
    while waiting:
        reading = min(waiting, key=lambda one: one.num_tokens / one.weight if one.weight else 0)
        piece = reading.next_piece()
        if piece is None:
            waiting.remove(reading)
            continue
        reading.num_documents += piece.is_start
        is_start = piece.is_start or last is not reading
        before = separator(tokenizer, has_previous=last is not None) if is_start else []
        last = reading
        reading.num_tokens += len(before) + len(piece.ids)
        yield reading, before + piece.ids
    if last is not None:
        end = end_of_document(tokenizer, has_previous=True)
        last.num_tokens += len(end)
        yield last, end


def pack_sources(
    config: DataConfig,
    tokenizer: Any,
    path: Path,
    max_tokens: int,
    on_progress: Callable[[int], None] = lambda done: None,
    remedy: str = MORE_TEXT,
) -> PackedSources:
    """Tokenise, mix, join and cut into blocks of `config.seq_len` tokens, straight to a file.

    Memory does not grow with the text. The same config and tokenizer give the same file.

    Args:
        config: Sources and their weights.
        tokenizer: A Hugging Face tokenizer.
        path: File to write; it has this name only when it is whole.
        max_tokens: Stop there, in the midst of a document if need be.
        on_progress: Told the number of tokens so far.
        remedy: What to do where there is too little text.

    Returns:
        The blocks, mapped from the file, and a record of the text: tokens, and for each source its
        weight, its share of the tokens, its documents, how often it was begun (`passes`), and
        whether it ran out.

    Raises:
        UserError: The text, or `max_tokens`, is shorter than one block; a source is refused.
    """
    name = ", ".join(config.data)
    if max_tokens < config.seq_len:
        raise UserError(
            f"{max_tokens} tokens of {name} are asked for, but one block of {config.seq_len} must "
            f"be filled. {remedy}"
        )
    readings = [Reading(source, weight, config, tokenizer) for source, weight in sources_of(config)]
    told = 0
    with BlockWriter(path, config.seq_len) as writer:
        for reading, ids in mixed(readings, tokenizer):
            excess = max(0, writer.num_tokens + len(ids) - max_tokens)
            reading.num_tokens -= excess
            writer.append(ids[: len(ids) - excess])
            if writer.num_tokens - told >= _TOLD_EVERY or writer.num_tokens == max_tokens:
                told = writer.num_tokens
                on_progress(told)
            if writer.num_tokens == max_tokens:
                break
        if writer.num_tokens < config.seq_len:
            raise UserError(
                f"{name} has {writer.num_tokens} tokens, but one block of {config.seq_len} must be "
                f"filled. {remedy}"
            )
        writer.finish()
    record = {
        "tokens": writer.num_tokens,
        "seq_len": config.seq_len,
        "sources": [reading.record(writer.num_tokens) for reading in readings],
        "boundaries": boundaries(tokenizer),
    }
    return PackedSources(TokenBlocks.load(path), record)


def boundaries(tokenizer: Any) -> dict[str, str]:
    """What is done where documents meet, in words."""
    return {
        "separator": separator_of(tokenizer),
        "blocks": "cut at equal length: a document may begin in one and go on in the next",
        "attention": "causal over the whole block, across documents; not across blocks",
        "position_ids": "0 at the start of each block; they go on across documents",
        "loss": "on every token of a block but the first, separators too",
    }


def shares_in_words(record: TextRecord) -> str:
    """Which source gave how much, in one line."""
    return "; ".join(_share_in_words(source) for source in record["sources"])


def _share_in_words(source: TextRecord) -> str:
    words = f"{source['name']} {source['share']:.1%} of the tokens"
    if source["weight"] is not None:
        words += f" (asked {source['weight']:.1%})"
        if source["ran_out"]:
            words += f", ran out after {source['tokens']:,}"
    return words


def _batches(documents: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    """Pieces with whether each starts a document, many at a time: tokenizers work in parallel."""
    batch: list[tuple[str, bool]] = []
    waiting = 0
    for document in documents:
        if not document:
            continue
        is_start = not isinstance(document, Continuation)
        for piece in cut(document):
            batch.append((str(piece), is_start))
            is_start = False
            waiting += len(piece)
            if waiting >= _BATCH_CHARACTERS or len(batch) >= _BATCH_PIECES:
                yield batch
                batch, waiting = [], 0
    if batch:
        yield batch
