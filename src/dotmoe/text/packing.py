"""Documents -> token ids joined end to end, from one source or a weighted mix of sources."""

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dotmoe.common.errors import UserError
from dotmoe.common.progress import Update, no_update
from dotmoe.models.identity import state_of
from dotmoe.text.blocks import block_writer
from dotmoe.text.config import DataConfig
from dotmoe.text.files import cut
from dotmoe.text.rows import Document
from dotmoe.text.sources import local_files, opened, sources_of

Record = dict[str, Any]
"""JSON record of a text, or of one of its sources."""


_PIECES_AT_ONCE = 64  # tokenizers process a batch in parallel


class Piece(NamedTuple):
    """Token ids of a document, or of a part of a long one, and the size of its text in bytes."""

    ids: list[int]
    is_start: bool
    num_bytes: int


def pack(
    documents: Iterable[Document], tokenizer: Any, max_tokens: int | None = None
) -> tuple[Tensor, float]:
    """Tokenise documents and join them: this packing is used for training and for perplexity.

    BOS goes before each document; if the tokenizer has none, EOS goes after each; without either,
    documents are joined as they are. No more text is read than `max_tokens` needs.

    Returns:
        Token ids, int32, and the tokens per byte of this text, which convert nats per token to bits
        per byte. Raises `UserError` if the documents contain no text.
    """
    tokens = array("i")
    num_bytes = 0
    source = (source_record("", None), tokenised(documents, tokenizer))
    for _, ids, size in joined([source], tokenizer):
        tokens.extend(ids)
        num_bytes += size
        if max_tokens is not None and len(tokens) >= max_tokens:
            break
    if not tokens:
        raise UserError("the data holds no text. Name sources with text in them.")
    return torch.frombuffer(tokens, dtype=torch.int32)[:max_tokens], len(tokens) / num_bytes


def pack_sources(
    config: DataConfig,
    tokenizer: Any,
    path: Path,
    max_tokens: int,
    on_progress: Update = no_update,
    *,
    answered: bool = False,
) -> Record:
    """Tokenise, mix and join sources, and write blocks of `config.seq_len` tokens to a file.

    Reads at most `max_tokens` tokens, in constant memory. A stopped process's tokens are kept, if
    no file has changed: the text before them is read again, but not tokenised. Returns a record of
    the text and of each source. Raises `UserError` if the text or `max_tokens` is shorter than one
    block, or a source cannot be used. With `answered`, the text stands beside own answers: rows
    that ask are left out, and a text too short for a block gives none.
    """
    records = [source_record(source, weight) for source, weight in sources_of(config)]
    files = [file for one in records for file in local_files(one["name"])]
    states = {str(file): state_of(file) for file in files}
    job = {"data": asdict(config), "max_tokens": max_tokens, "files": states}
    on_progress(0, max_tokens)  # the time of the first documents counts
    with block_writer(path, config.seq_len, job) as writer:
        records = writer.state.get("sources", records)
        last = records[writer.state["last"]] if writer.state else None
        sources = []
        for one in records:
            read = _counted(opened(one["name"], config, tokenizer, answered=answered), one)
            sources.append((one, tokenised(read, tokenizer, one["pieces"])))
        for record, ids, _ in joined(sources, tokenizer, last, max_tokens):
            excess = max(0, writer.num_tokens + len(ids) - max_tokens)
            record["tokens"] -= excess
            writer.append(ids[: len(ids) - excess])
            on_progress(writer.num_tokens, max_tokens)
            if writer.num_tokens == max_tokens:
                break
            last_number = next(number for number, one in enumerate(records) if one is record)
            writer.keep({"sources": records, "last": last_number})
        if not answered:
            _require_a_block(config, writer.num_tokens, max_tokens)
    for record in records:
        record["share"] = record["tokens"] / max(1, writer.num_tokens)
    return {
        "tokens": writer.num_tokens,
        "asked": max_tokens,
        "seq_len": config.seq_len,
        "sources": records,
        "separator": separator_of(tokenizer),
    }


def _require_a_block(config: DataConfig, num_tokens: int, max_tokens: int) -> None:
    """Refuse text that is too short for one block."""
    if num_tokens < config.seq_len:
        raise UserError(
            f"{', '.join(config.data)} has {num_tokens} tokens (read at most: {max_tokens}), too "
            f"few for a block of {config.seq_len}. Give more text, ask for more tokens, or, for "
            "training text, lower seq_len."
        )


def source_record(name: str, weight: float | None) -> Record:
    """The record of a source before any of it is read."""
    counts = {"share": 0.0, "tokens": 0, "documents": 0, "pieces": 0, "without_text": 0}
    return {"name": name, "weight": weight, **counts, "read_of_piece": 0, "ran_out": False}


def _counted(documents: Iterable[Document], record: Record) -> Iterator[Document]:
    """The documents; counts those without text, of all that are read, in the source's record."""
    record["without_text"] = 0  # what a stopped process counted is read again
    for document in documents:
        if document.says_nothing:
            record["without_text"] += 1
        yield document


def joined(
    sources: Sequence[tuple[Record, Iterator[Piece]]],
    tokenizer: Any,
    last: Record | None = None,
    max_tokens: int | None = None,
) -> Iterator[tuple[Record, list[int], int]]:
    """Iterate over the pieces of several sources, mixed by weight or one source after the other.

    With weights, the next piece comes from the source with the fewest tokens for its weight: after
    T tokens a source of share w has given between w(T - S) and wT + s; s is its longest document,
    S the sum of all sources' longest documents. A piece is cut where its source has its share of
    `max_tokens`, so that this is the share in the end, too; its rest comes if other sources run
    out. If another source comes between the pieces of a long document, its rest counts as a
    document. `last` is the record of the source read last.

    Yields the record of the source (updated in place), token ids with their separators, and the
    number of bytes of text.
    """
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    start = [] if bos is None else [bos]
    end = [] if bos is not None or eos is None else [eos]
    waiting = [_Source(*source) for source in sources if not source[0]["ran_out"]]
    while waiting:
        source = min(waiting, key=_Source.tokens_for_weight)
        record = source.record
        piece = source.next_piece(max_tokens)
        if piece is None:
            record["ran_out"] = True
            waiting.remove(source)
            continue
        if piece.is_start:
            record["documents"] += 1
        ids = piece.ids
        if piece.is_start or last is not record:
            before = start if last is None else [*end, *start]
            ids = [*before, *ids]
        last = record
        record["tokens"] += len(ids)
        yield record, ids, piece.num_bytes
    if last is not None:
        last["tokens"] += len(end)
        yield last, end, 0


class _Source:
    """A source that is read: its record, and the pieces that are not read yet."""

    def __init__(self, record: Record, pieces: Iterator[Piece]) -> None:
        self.record, self._pieces = record, pieces
        if read := record["read_of_piece"]:
            self._pieces = _behind(read, pieces)

    def tokens_for_weight(self) -> float:
        """Tokens read of it for its weight; 0 where sources have none."""
        tokens: int = self.record["tokens"]
        weight: float | None = self.record["weight"]
        if not weight:
            return 0.0
        return tokens / weight

    def next_piece(self, max_tokens: int | None) -> Piece | None:
        """The next piece, cut where the source has its share of `max_tokens`; None at the end."""
        piece = next(self._pieces, None)
        if piece is None:
            return None
        room = self._room(max_tokens)
        if room is None or len(piece.ids) <= room:
            self.record["pieces"] += 1
            self.record["read_of_piece"] = 0
            return piece
        self._pieces = chain([_rest(piece, room)], self._pieces)
        self.record["read_of_piece"] += room
        return piece._replace(ids=piece.ids[:room])

    def _room(self, max_tokens: int | None) -> int | None:
        """Tokens that its share of `max_tokens` leaves; None if nothing or no share limits it."""
        weight: float | None = self.record["weight"]
        if weight is None or max_tokens is None:
            return None
        left = weight * max_tokens - self.record["tokens"]
        return math.ceil(left) if left > 0 else None


def _behind(tokens: int, pieces: Iterator[Piece]) -> Iterator[Piece]:
    """The pieces without the first tokens of the first one, which a stopped process read."""
    for piece in islice(pieces, 1):
        yield _rest(piece, tokens)
    yield from pieces


def _rest(piece: Piece, tokens: int) -> Piece:
    """A piece behind its first tokens, with which its bytes were counted."""
    return Piece(piece.ids[tokens:], is_start=False, num_bytes=0)


def tokenised(documents: Iterable[Document], tokenizer: Any, skip: int = 0) -> Iterator[Piece]:
    """Tokenise documents piece by piece, but the first `skip` pieces; skip empty documents.

    Text is text: the name of a control token, such as `</s>`, is tokenised like other words, except
    in documents that are rendered.
    """
    parts = islice(_parts_of(documents), skip, None)
    while batch := list(islice(parts, _PIECES_AT_ONCE)):
        for is_rendered, group in groupby(batch, key=lambda part: part.is_rendered):
            alike = list(group)
            encoded = tokenizer(
                [part.text for part in alike],
                add_special_tokens=False,
                split_special_tokens=not is_rendered,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,  # a piece may be longer than the model's context
            )["input_ids"]
            for ids, part in zip(encoded, alike, strict=True):
                yield Piece(ids, not part.is_continued, len(part.text.encode()))


def _parts_of(documents: Iterable[Document]) -> Iterator[Document]:
    """The documents cut into parts that are tokenised at once, without empty ones."""
    for document in documents:
        for number, text in enumerate(filter(None, cut(document.text))):
            is_continued = document.is_continued or number > 0
            yield document._replace(text=text, is_continued=is_continued)


def separator_id(tokenizer: Any) -> int | None:
    """Id of the token between documents; None if there is none."""
    bos: int | None = tokenizer.bos_token_id
    return tokenizer.eos_token_id if bos is None else bos


def separator_of(tokenizer: Any) -> str:
    """Description of what separates documents under this tokenizer."""
    if tokenizer.bos_token_id is not None:
        return f"{tokenizer.bos_token} before each"
    if tokenizer.eos_token_id is not None:
        return f"{tokenizer.eos_token} after each"
    return "nothing between them"
