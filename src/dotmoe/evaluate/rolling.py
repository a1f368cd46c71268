"""Perplexity a word by rolling log-likelihood, as lm-evaluation-harness defines it."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dotmoe.data import Continuation
from dotmoe.errors import UserError
from dotmoe.evaluate.head_chunks import hidden_states, token_nats

PAPER_WINDOWS = (2048, 4096, 8192, 32768)
"""Windows of tab:seqlen_ppl, in tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RollingResult:
    """Perplexity of whole documents, each token scored once, and what is needed to compare it."""

    window: int
    """Tokens that the model sees at once, at most."""
    word_perplexity: float
    """exp(nats / words)."""
    byte_perplexity: float
    """exp(nats / bytes)."""
    bits_per_byte: float
    nats: float
    """Negative log-likelihood of all documents."""
    words: int
    """Parts between white space, counted as the harness does."""
    bytes: int
    """Of UTF-8."""
    tokens: int
    """Tokens scored: all, the first of a document after a prefix token."""
    documents: int
    text: tuple[str, ...]
    """Names of the sources."""
    protocol: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, marked as measured."""
        return asdict(self) | {"text": list(self.text), "unit": "word", "origin": "measured"}


def whole_documents(pieces: Iterable[str]) -> list[str]:
    """Documents in one piece each, from those that `dotmoe.data.documents` streams."""
    texts: list[list[str]] = []
    for piece in pieces:
        if isinstance(piece, Continuation):
            texts[-1].append(str(piece))
        else:
            texts.append([str(piece)])
    return ["".join(parts) for parts in texts]


def rolling_windows(num_tokens: int, window: int) -> list[tuple[slice, int]]:
    """Which tokens go in at once, and how many of the last ones are scored.

    Positions are those of the prefix token followed by the document's tokens. Every window but the
    last scores all that it sees; the last reaches back so that it is full too, and scores only what
    no window scored before.

    Args:
        num_tokens: Tokens of the document, without the prefix token.
        window: Tokens that go in at once, 1 or more.

    Example:
        >>> rolling_windows(5, 2)
        [(slice(0, 2, None), 2), (slice(2, 4, None), 2), (slice(3, 5, None), 1)]
    """
    ends = [min(start + window, num_tokens) for start in range(0, num_tokens, window)]
    starts = [0, *ends[:-1]]
    return [
        (slice(max(0, end - window), end), end - start)
        for start, end in zip(starts, ends, strict=True)
    ]


def rolling_perplexity(
    model: Any,
    tokenizer: Any,
    documents: Sequence[str],
    window: int,
    text: tuple[str, ...] = (),
    on_progress: Callable[[int, int], None] | None = None,
) -> RollingResult:
    """Perplexity a word: exp of the documents' negative log-likelihood over their words.

    A document is preceded by the BOS token, or EOS where there is none, and tokenised whole with
    the tokenizer's own special tokens: where it adds a BOS itself there are two and the second is
    scored, as in the harness. Documents do not see each other.

    Args:
        model: A causal language model of Transformers, in evaluation mode.
        tokenizer: Its tokenizer.
        documents: Texts, each tokenised in one piece.
        window: Tokens that the model sees at once, 1 to its context.
        text: What to call the text.
        on_progress: Told tokens scored and tokens in all.

    Raises:
        UserError: A window beyond the context, or nothing to score.
    """
    require_window(window, int(model.config.max_position_embeddings))
    prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    encoded = [tokenizer(document, verbose=False).input_ids for document in documents]
    total = sum(map(len, encoded))
    if total == 0 or prefix is None:
        lacks = "the text has no tokens" if total == 0 else "the tokenizer has neither BOS nor EOS"
        raise UserError(f"{lacks}, so there is no rolling perplexity. Give another text or model.")
    nats, done = 0.0, 0
    for ids in encoded:
        row = torch.tensor([prefix, *ids])
        for part, scored in rolling_windows(len(ids), window):
            nats += _window_nats(model, row, part, scored)
            done += scored
            if on_progress is not None:
                on_progress(done, total)
    words = sum(len(re.split(r"\s+", document)) for document in documents)
    num_bytes = sum(len(document.encode()) for document in documents)
    return RollingResult(
        window=window,
        word_perplexity=math.exp(nats / words),
        byte_perplexity=math.exp(nats / num_bytes),
        bits_per_byte=nats / num_bytes / math.log(2),
        nats=nats,
        words=words,
        bytes=num_bytes,
        tokens=total,
        documents=len(documents),
        text=text,
        protocol=(
            f"Rolling log-likelihood in windows of {window} tokens: each document tokenised whole, "
            "every token scored once, the last window of a document reaching back to be full; "
            "nats over words, words counted between white space."
        ),
    )


def require_window(window: int, context: int) -> None:
    """Refuse a window that the model has no positions for.

    Raises:
        UserError: It lies outside 1 to the context.
    """
    if not 1 <= window <= context:
        raise UserError(
            f"the window is {window}, but must lie in 1 to {context}, the model's context. "
            "Choose one."
        )


@torch.no_grad()
def _window_nats(model: Any, row: Tensor, part: slice, scored: int) -> float:
    hidden_TD = hidden_states(model, row[part][None])[0][-scored:]
    labels_T = row[1:][part][-scored:].to(hidden_TD.device)
    return float(token_nats(model, hidden_TD, labels_T).sum())
