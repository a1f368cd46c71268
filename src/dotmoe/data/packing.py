"""Documents -> tokens joined end to end, of one source or of many by their shares."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dotmoe.data.blocks import block_writer
from dotmoe.data.sources import Continuation, DataConfig, cut, opened, sources_of
from dotmoe.errors import UserError
from dotmoe.progress import Update, no_update

_BATCH_PIECES = 64
"""Tokenised at a time, since tokenizers work in parallel."""

Record = dict[str, Any]
"""What is written about a text, or about one source of it."""


class Piece(NamedTuple):
    """Token ids of a document, or of a part of a long one, and the bytes of its text."""

    ids: list[int]
    is_start: bool
    num_bytes: int


def pack(
    documents: Iterable[str], tokenizer: Any, max_tokens: int | None = None
) -> tuple[Tensor, float]:
    """Tokenise documents and join them: this packing is used for training and for perplexity.

    Each document is preceded by the BOS token; where the tokenizer has none it is followed by EOS;
    where it has neither, nothing is put between. A document longer than 64k characters is
    tokenised in pieces cut at line ends.

    A `Continuation` among the documents goes on with the one before it. They are read no further
    than `max_tokens` needs, which may be in the midst of one.

    Returns:
        Token ids, int32, and tokens a byte of the same text, which turns nats a token into bits a
        byte.

    Raises:
        UserError: The documents hold no text.
    """
    tokens, num_bytes = array("i"), 0
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
    remedy: str = "Give more text, or lower seq_len.",
) -> Record:
    """Tokenise, mix, join and cut into blocks of `config.seq_len` tokens, straight to a file.

    Memory does not grow with the text. The same config and tokenizer give the same `TokenBlocks`.
    Reading stops at `max_tokens`; `remedy` says what to do where there is too little text.

    Returns:
        A record of the text: tokens, and for each source its weight, its share of the tokens, its
        documents, how often it was begun (`passes`), and whether it ran out.

    Raises:
        UserError: The text, or `max_tokens`, is shorter than one block; a source is refused.
    """
    records = [source_record(source, weight) for source, weight in sources_of(config)]
    sources = [(record, _passes(record, config, tokenizer)) for record in records]
    with block_writer(path, config.seq_len) as writer:
        for record, ids, _ in joined(sources, tokenizer):
            excess = max(0, writer.num_tokens + len(ids) - max_tokens)
            record["tokens"] -= excess
            writer.append(ids[: len(ids) - excess])
            on_progress(writer.num_tokens, max_tokens)
            if writer.num_tokens == max_tokens:
                break
        if writer.num_tokens < config.seq_len:
            raise UserError(
                f"{', '.join(config.data)} has {writer.num_tokens} tokens, of {max_tokens} at "
                f"most, but one block of {config.seq_len} must be filled. {remedy}"
            )
    for record in records:
        record["share"] = record["tokens"] / writer.num_tokens
    return {
        "tokens": writer.num_tokens,
        "seq_len": config.seq_len,
        "sources": records,
        "boundaries": boundaries(tokenizer),
    }


def source_record(name: str, weight: float | None) -> Record:
    """What is known of a source of which nothing is read yet."""
    counts = {"share": 0.0, "tokens": 0, "documents": 0, "passes": 0, "ran_out": False}
    return {"name": name, "weight": weight, **counts}


def joined(
    sources: Sequence[tuple[Record, Iterator[Piece]]], tokenizer: Any
) -> Iterator[tuple[Record, list[int], int]]:
    """Piece after piece of sources that are read side by side or one after the other.

    With weights, the next piece is always of the source whose tokens, divided by its weight, are
    fewest. With w_i the weight of source i, s_i its longest piece and T tokens so far, its tokens
    are then between w_i T - w_i (s_1 + ... + s_n) and w_i T + s_i at every moment while no source
    has run out. A source that has run out leaves the others in their proportions. Without weights,
    one source is read after the other.

    A document of more than 64k characters comes in pieces; where those of another source come
    between, the rest of it counts as a document of its own.

    Yields:
        Record of the source, which is kept up to date, token ids with their separators, and bytes
        of text.
    """
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    start = [] if bos is None else [bos]
    end = [] if bos is not None or eos is None else [eos]
    waiting, last = list(sources), None
    while waiting:
        source = min(waiting, key=lambda one: one[0]["tokens"] / (one[0]["weight"] or torch.inf))
        record, pieces = source
        piece = next(pieces, None)
        if piece is None:
            record["ran_out"] = True
            waiting.remove(source)
            continue
        record["documents"] += piece.is_start
        ids = piece.ids
        if piece.is_start or last is not record:
            ids = [*(() if last is None else end), *start, *ids]
        last = record
        record["tokens"] += len(ids)
        yield record, ids, piece.num_bytes
    if last is not None:
        last["tokens"] += len(end)
        yield last, end, 0


def tokenised(documents: Iterable[str], tokenizer: Any) -> Iterator[Piece]:
    """Pieces of documents as token ids, some at a time; empty documents leave no trace."""

    def cut_up() -> Iterator[tuple[str, bool]]:
        for document in documents:
            is_start = not isinstance(document, Continuation)
            for piece in filter(None, cut(document)):
                yield str(piece), is_start
                is_start = False

    pieces = cut_up()
    while batch := list(islice(pieces, _BATCH_PIECES)):
        encoded = tokenizer(
            [piece for piece, _ in batch],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # a piece may be longer than the model's context
        )["input_ids"]
        for ids, (piece, is_start) in zip(encoded, batch, strict=True):
            yield Piece(ids, is_start, len(piece.encode()))


def boundaries(tokenizer: Any) -> dict[str, str]:
    """What is done where documents meet, in words."""
    return {
        "separator": separator_of(tokenizer),
        "blocks": "cut at equal length: a document may begin in one and go on in the next",
        "attention": "causal over the whole block, across documents; not across blocks",
        "position_ids": "0 at the start of each block; they go on across documents",
        "loss": "on every token of a block but the first, separators too",
    }


def separator_of(tokenizer: Any) -> str:
    """How documents are separated by this tokenizer, in words."""
    if tokenizer.bos_token_id is not None:
        return f"{tokenizer.bos_token} before each"
    if tokenizer.eos_token_id is not None:
        return f"{tokenizer.eos_token} after each"
    return "nothing between them"


def _passes(record: Record, config: DataConfig, tokenizer: Any) -> Iterator[Piece]:
    """Pieces of a source, read as often as the config allows."""
    # Read in order, sources are read once: alignment repeats the blocks themselves.
    allowed = 1 if record["weight"] is None else config.data_epochs
    while record["passes"] < allowed:
        texts = opened(record["name"], config, record["passes"])
        record["passes"] += 1
        yield from tokenised(texts, tokenizer)
