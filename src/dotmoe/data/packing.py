"""Documents -> one row of token ids."""

from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dotmoe.data.files import Continuation, cut
from dotmoe.errors import UserError

_BATCH_CHARACTERS = 1 << 18
_BATCH_PIECES = 256


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
