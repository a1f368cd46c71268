"""Perplexity of a causal language model on a text, with its protocol beside the number."""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dotmoe.data import DataConfig, Packed, pack
from dotmoe.data import documents as documents_of
from dotmoe.data.packing import separator_of
from dotmoe.errors import UserError
from dotmoe.evaluate.gptq_text import gptq_packed

MAX_LOGITS = 1 << 28
"""Logits of one forward pass, unless one window alone has more: 1 GiB in float32."""

_MAX_FLOAT32_LOGITS = 1 << 25

_BATCH = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    """Text to measure perplexity on, and how it is cut."""

    text: tuple[str, ...] = ()
    """Files or other sources, as `data` takes them."""
    window: int | None = None
    """Tokens of a window, 2 to the model's context. Default: 2048, or the whole context if less."""
    max_tokens: int | None = None
    """Read no more tokens than this, 2 or more. Default: the whole text."""
    protocol: Literal["packed", "gptq"] = "packed"
    r"""How text becomes windows. packed: documents joined as for training. gptq: lines joined by
    "\n\n" and tokenised whole, an unfilled last window dropped, as papers on quantisation and
    pruning measure WikiText-2."""
    batch_size: int | Literal["auto"] = "auto"
    """Texts a forward pass, 1 or more. auto: found for tasks on a GPU; else 8 windows, 16 requests;
    fewer run at once where the vocabulary is large."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PerplexityResult:
    """A perplexity and everything needed to compare it with another."""

    loss: float
    """Mean cross-entropy in nats a token."""
    perplexity: float
    """exp(loss)."""
    bits_per_byte: float
    """loss / ln 2 times the text's tokens a byte of UTF-8; comparable between tokenizers."""
    window: int
    """Tokens of a window."""
    tokens: int
    """Tokens scored."""
    unit: str
    """What the loss is averaged over."""
    text: tuple[str, ...]
    """Names of the sources."""
    protocol: str
    """How the text was cut and scored, in one sentence."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, marked as measured."""
        return asdict(self) | {"text": list(self.text), "origin": "measured"}


def perplexity(
    model: Any,
    tokenizer: Any,
    documents: Iterable[str],
    config: EvaluateConfig,
    on_progress: Callable[[int, int], None] | None = None,
) -> PerplexityResult:
    """Perplexity a token over non-overlapping windows of the packed documents.

    The documents are joined as `config.protocol` says: as for training (`dotmoe.data.pack`), or by
    `gptq_packed`. In each window every token after the first is predicted from those before it in
    the window; a last, shorter window counts from 2 tokens up, but not with `gptq`.

    Args:
        model: Called as `model(input_ids=..., use_cache=False).logits`; in evaluation mode. Its
            `config` states vocabulary and context.
        tokenizer: Its tokenizer.
        documents: Texts, as `dotmoe.data.documents` streams them.
        config: Window, limit and batch size; `text` is only recorded.
        on_progress: Told windows done and windows in all.

    Raises:
        UserError: Text or window too short, window beyond the context, or loss not finite.
    """
    packed = _packed(documents, tokenizer, config)
    return packed_perplexity(model, tokenizer, packed, config, on_progress)


def packed_text(config: EvaluateConfig, tokenizer: Any) -> Packed:
    """Tokens of `config.text`, joined as `config.protocol` says.

    Raises:
        UserError: A source that is missing, damaged or empty.
    """
    return _packed(documents_of(DataConfig(data=config.text)), tokenizer, config)


def _packed(documents: Iterable[str], tokenizer: Any, config: EvaluateConfig) -> Packed:
    join = gptq_packed if config.protocol == "gptq" else pack
    return join(documents, tokenizer, config.max_tokens)


def packed_perplexity(
    model: Any,
    tokenizer: Any,
    packed: Packed,
    config: EvaluateConfig,
    on_progress: Callable[[int, int], None] | None = None,
) -> PerplexityResult:
    """`perplexity` of text that is packed already; `config.max_tokens` plays no part."""
    window = window_of(config, int(model.config.max_position_embeddings))
    if packed.tokens.numel() < 2:
        raise UserError("the text has 1 token, and 2 are needed to score one. Give more text.")
    tokens = packed.tokens
    if config.protocol == "gptq":
        if tokens.numel() < window:
            raise UserError(
                f"the text has {tokens.numel()} tokens, which fill no window of {window}. "
                "Give more text, or lower --window."
            )
        tokens = tokens[: tokens.numel() // window * window]
    nats, scored = _summed(model, tokens, window, batch_of(config), on_progress)
    loss = nats / scored
    if not math.isfinite(loss) or loss > 100:
        raise UserError(
            f"the loss is {loss} nats a token, so the model is broken or its number format "
            "overflows. Load it as float32 to tell which."
        )
    return PerplexityResult(
        loss=loss,
        perplexity=math.exp(loss),
        bits_per_byte=loss / math.log(2) * packed.tokens_per_byte,
        window=window,
        tokens=scored,
        unit="token",
        text=config.text,
        protocol=(
            f"{_joined(config, tokenizer)} and cut into non-overlapping windows of "
            f"{window} tokens; the first token of each window is not scored; {scored:,} tokens "
            "scored; mean taken over tokens."
        ),
    )


def summed_loss(model: Any, tokens_BT: Tensor) -> float:
    """Cross-entropy in nats summed over all tokens but the first of each row, in float32.

    Args:
        model: Called as `model(input_ids=..., use_cache=False).logits`.
        tokens_BT: Token ids; rows do not see each other. All logits of one call exist at once, in
            the model's number format.
    """
    with torch.no_grad():
        tokens = tokens_BT.long().to(next(model.parameters()).device)
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].flatten(0, 1)
        labels = tokens[:, 1:].flatten()
        chunk = max(1, _MAX_FLOAT32_LOGITS // logits.shape[-1])
        nats = 0.0
        for start in range(0, len(labels), chunk):
            part = slice(start, start + chunk)
            losses = F.cross_entropy(logits[part].float(), labels[part], reduction="none")
            nats += float(losses.double().sum())
        return nats


def _joined(config: EvaluateConfig, tokenizer: Any) -> str:
    if config.protocol == "gptq":
        return r'Lines joined by "\n\n", tokenised whole, the last unfilled window dropped,'
    return f"Documents joined ({separator_of(tokenizer)})"


def batch_of(config: EvaluateConfig) -> int:
    """Windows a forward pass."""
    return _BATCH if config.batch_size == "auto" else config.batch_size


def window_of(config: EvaluateConfig, context: int) -> int:
    """Tokens of a window.

    Raises:
        UserError: Window, batch size or limit out of range.
    """
    window = min(2048, context) if config.window is None else config.window
    if not 2 <= window <= context:
        raise UserError(
            f"window is {window}, but must lie in 2 to {context}, the model's context. Choose one."
        )
    if batch_of(config) < 1:
        raise UserError(f"batch_size is {config.batch_size}. Choose 1 or more.")
    if config.max_tokens is not None and config.max_tokens < 2:
        raise UserError(f"max_tokens is {config.max_tokens}, and 2 are needed. Choose more.")
    return window


def _summed(
    model: Any,
    tokens: Tensor,
    window: int,
    batch_size: int,
    on_progress: Callable[[int, int], None] | None,
) -> tuple[float, int]:
    """Nats and number of scored tokens, over all windows."""
    num_full = tokens.numel() // window
    rows = max(1, min(batch_size, MAX_LOGITS // (window * int(model.config.vocab_size))))
    windows = tokens[: num_full * window].view(num_full, window)
    batches = [windows[start : start + rows] for start in range(0, num_full, rows)]
    tail = tokens[num_full * window :]
    if tail.numel() >= 2:
        batches.append(tail[None])
    nats, scored, done = 0.0, 0, 0
    num_windows = sum(len(batch) for batch in batches)
    for batch in batches:
        nats += summed_loss(model, batch)
        scored += batch[:, 1:].numel()
        done += len(batch)
        if on_progress is not None:
            on_progress(done, num_windows)
    return nats, scored
