"""Perplexity a word by rolling log-likelihood, as lm-evaluation-harness defines it."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dotmoe.data import Continuation, DataConfig, documents
from dotmoe.errors import UserError
from dotmoe.evaluate.config import EvaluateConfig
from dotmoe.evaluate.models import StockModel, by_side
from dotmoe.evaluate.scoring import TokenNats, stock_nats
from dotmoe.progress import Progress, Update, no_update

PAPER_WINDOWS = (2048, 4096, 8192, 32768)
"""Windows of tab:seqlen_ppl, in tokens."""

PROTOCOL = (
    "Rolling log-likelihood: each document tokenised whole, every token scored once, the last "
    "window of a document reaching back to be full; nats over words, words counted between white "
    "space."
)


def measure_words(config: EvaluateConfig, progress: Progress) -> dict[str, Any]:
    """Perplexity a word of `config.corpus.text` at each window, of each model."""
    config.corpus.require_text()
    if config.corpus.max_tokens is not None:
        raise UserError(
            "--max-tokens cuts documents, and --word-perplexity scores whole ones. Leave it out, "
            "and give a shorter text."
        )
    texts = whole_documents(documents(DataConfig(data=config.corpus.text)))

    def measured(stock: StockModel) -> dict[str, Any]:
        fitting = [window for window in PAPER_WINDOWS if window <= stock.context]
        windows = config.word_perplexity or fitting or [stock.context]
        if max(windows) > stock.context:
            raise UserError(
                f"the window is {max(windows)}, but must lie in 1 to {stock.context}, the model's "
                "context. Choose one."
            )
        nats = stock_nats(stock.model)
        rows = [rolling_perplexity(nats, stock.tokenizer, texts, w, update) for w in windows]
        return {"windows": rows}

    with progress.bar("evaluate") as update:
        sides = by_side(config, measured)
    return {**sides, "unit": "word", "text": list(config.corpus.text), "protocol": PROTOCOL}


def rolling_perplexity(
    nats: TokenNats,
    tokenizer: Any,
    texts: Sequence[str],
    window: int,
    on_progress: Update = no_update,
) -> dict[str, Any]:
    """Perplexity a word: exp of the documents' negative log-likelihood over their words.

    A document is preceded by the BOS token, or EOS where there is none, and tokenised whole with
    the tokenizer's own special tokens: where it adds a BOS itself there are two and the second is
    scored, as in the harness. Documents do not see each other.

    The model sees `window` tokens at once, 1 to its context; `on_progress` is told tokens scored
    and tokens in all.

    Returns:
        `word_perplexity` (exp(nats / words)), `bits_per_byte`, the counts `words` (parts between
        white space, as the harness counts), `bytes`, `tokens` and `documents`, and `window`.

    Raises:
        UserError: Nothing to score.
    """
    prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    encoded = [tokenizer(text, verbose=False).input_ids for text in texts]
    num_tokens = sum(map(len, encoded))
    if num_tokens == 0 or prefix is None:
        lacks = "the text has no tokens" if num_tokens == 0 else "the tokenizer has no BOS or EOS"
        raise UserError(f"{lacks}, so there is no rolling perplexity. Give another text or model.")
    total, done = 0.0, 0
    for ids in encoded:
        row = torch.tensor([prefix, *ids])
        for part, scored in rolling_windows(len(ids), window):
            total += float(nats(row[part.start : part.stop + 1][None])[0, -scored:].sum())
            done += scored
            on_progress(done, num_tokens)
    words = sum(len(re.split(r"\s+", text)) for text in texts)
    num_bytes = sum(len(text.encode()) for text in texts)
    return {
        "window": window,
        "word_perplexity": math.exp(total / words),
        "bits_per_byte": total / num_bytes / math.log(2),
        "words": words,
        "bytes": num_bytes,
        "tokens": num_tokens,
        "documents": len(texts),
    }


def rolling_windows(num_tokens: int, window: int) -> list[tuple[slice, int]]:
    """Which tokens go in at once, and how many of the last ones are scored.

    Positions are those of the prefix token followed by the document's tokens. The last window
    reaches back so that it is full too, and scores only what no window scored before.

    Example:
        >>> rolling_windows(5, 2)
        [(slice(0, 2, None), 2), (slice(2, 4, None), 2), (slice(3, 5, None), 1)]
    """
    starts = range(0, num_tokens, window)
    ends = [min(start + window, num_tokens) for start in starts]
    return [
        (slice(max(0, end - window), end), end - start)
        for start, end in zip(starts, ends, strict=True)
    ]


def whole_documents(pieces: Iterable[str]) -> list[str]:
    """Documents in one piece each, from those that `dotmoe.data.documents` streams."""
    texts: list[str] = []
    for piece in pieces:
        if isinstance(piece, Continuation):
            texts[-1] += piece
        else:
            texts.append(str(piece))
    return texts
