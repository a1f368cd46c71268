"""Perplexity of anything that scores tokens, a token or a word, with its protocol beside it."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoTokenizer

from dotmoe.checkpoint import checkpoint_folder
from dotmoe.data import Continuation, DataConfig, TokenBlocks, documents, pack, separator_of
from dotmoe.errors import UserError
from dotmoe.evaluate import models
from dotmoe.evaluate.config import EvaluateConfig, TextConfig
from dotmoe.evaluate.models import StockModel, TokenNats, stock_nats
from dotmoe.export.record import RECORD_FILE, require_checksums
from dotmoe.files import read_json
from dotmoe.load import load_weights
from dotmoe.models.dense import DenseModel
from dotmoe.progress import Progress, Update, no_update

PAPER_WINDOWS = (2048, 4096, 8192, 32768)
"""Windows of tab:seqlen_ppl, in tokens."""


class Text(NamedTuple):
    """Tokens to score, and how they were made."""

    tokens: Tensor
    """Token ids, one dimension."""
    tokens_per_byte: float
    """Of the same text in UTF-8: turns nats a token into bits a byte."""
    names: tuple[str, ...]
    joined: str
    """How documents became one row of tokens, the beginning of a sentence."""
    only_full_windows: bool = False


def perplexity(
    nats: TokenNats, text: Text, window: int, batch_size: int = 8, on_progress: Update = no_update
) -> dict[str, Any]:
    """Perplexity a token over windows of the text that do not overlap, 2 tokens to the context.

    Each token of a window but the first is predicted from those before it in the window. A last,
    shorter window counts from 2 tokens up, unless `text.only_full_windows`. `nats` is given
    `batch_size` windows a call; `on_progress` is told tokens.

    Returns:
        `loss` (mean nats a token), `perplexity`, `bits_per_byte` (comparable between tokenizers),
        and how it was measured: `window`, `tokens` scored, `unit`, `text`, `protocol`, `origin`.

    Raises:
        UserError: Nothing to score, or a loss that no working model has.
    """
    full, rest = divmod(text.tokens.numel(), window)
    batches = list(torch.split(text.tokens[: full * window].view(full, window), batch_size))
    if rest >= 2 and not text.only_full_windows:
        batches.append(text.tokens[-rest:][None])
    if not sum(map(len, batches)):
        raise UserError(
            f"{text.tokens.numel()} tokens of text fill no window of {window}. Give more text, or "
            "lower --window."
        )
    total, scored, done = 0.0, 0, 0
    for batch in filter(len, batches):
        nats_BT = nats(batch)
        total += float(nats_BT.sum())
        scored += nats_BT.numel()
        done += batch.numel()
        on_progress(done, sum(each.numel() for each in batches))
    loss = total / scored
    if not math.isfinite(loss) or loss > 100:
        raise UserError(
            f"the loss is {loss} nats a token, so the model is broken or its number format "
            "overflows. Load it as float32 to tell which."
        )
    return {
        "origin": "measured",
        "loss": loss,
        "perplexity": math.exp(loss),
        "bits_per_byte": loss / math.log(2) * text.tokens_per_byte,
        "window": window,
        "tokens": scored,
        "unit": "token",
        "text": list(text.names),
        "protocol": f"{text.joined} and cut into non-overlapping windows of {window} tokens; the "
        f"first token of each window is not scored; {scored:,} tokens scored; mean taken over "
        "tokens.",
    }


def packed_text(config: TextConfig, tokenizer: Any, pieces: Iterable[str] | None = None) -> Text:
    r"""Tokens of `config.text`, joined as `config.protocol` says.

    packed: see `dotmoe.data.pack`. gptq: `"\n\n".join(lines)` tokenised whole with the tokenizer's
    own special tokens. There a line keeps its line end, and a blank one is empty: these are the
    rows of the data set `wikitext-2-raw-v1`, made again from the file they were cut from.

    `pieces`, as `dotmoe.data.documents` streams them, are read instead of the sources. Raises a
    `UserError` for a source that is missing, damaged or empty.
    """
    pieces = documents(DataConfig(data=config.text)) if pieces is None else pieces
    if config.protocol == "packed":
        joined = f"Documents joined ({separator_of(tokenizer)})"
        return Text(*pack(pieces, tokenizer, config.max_tokens), config.text, joined)
    text = "".join(pieces)
    lines = text.removesuffix("\n").split("\n")
    rows = "\n\n".join(line + "\n" if line.strip() else "" for line in lines)
    ids = tokenizer(rows, verbose=False).input_ids
    if not ids or not text:
        raise UserError("the data holds no text. Name sources with text in them.")
    return Text(
        tokens=torch.tensor(ids[: config.max_tokens], dtype=torch.int32),
        tokens_per_byte=len(ids) / len(text.encode()),
        names=config.text,
        joined=r'Lines joined by "\n\n", tokenised whole, the last unfilled window dropped,',
        only_full_windows=True,
    )


def heldout_text(heldout: TokenBlocks, tokenizer: Any, names: tuple[str, ...]) -> Text:
    """Blocks that were packed for a run, as text to score; `names` is what to call it."""
    tokens = heldout.tokens_BT.flatten()
    num_bytes = len(tokenizer.decode(tokens.tolist(), skip_special_tokens=True).encode())
    joined = f"Documents joined ({separator_of(tokenizer)})"
    return Text(tokens, tokens.numel() / max(1, num_bytes), names, joined)


def heldout_perplexity(
    model: Any,
    tokenizer: Any,
    texts: Mapping[tuple[str, ...], TokenBlocks],
    on_progress: Update = no_update,
) -> dict[str, Any]:
    """`perplexity` of a stock model on held-out blocks; that on those of a second text as `other`.

    `texts` has the blocks by what to call them.
    """
    first, *others = (
        perplexity(
            stock_nats(model),
            heldout_text(blocks, tokenizer, names),
            blocks.seq_len,
            on_progress=on_progress,
        )
        for names, blocks in texts.items()
    )
    return first | ({"other": others[0]} if others else {})


def perplexities(
    dense: DenseModel,
    exports: Mapping[str, Path],
    texts: Mapping[tuple[str, ...], TokenBlocks],
    on_progress: Update = no_update,
) -> dict[str, Any]:
    """`heldout_perplexity` of a dense model, as `dense`, and of exports by their names.

    Exports run in the dense model's dtype and on its device, one at a time beside it.
    """
    dtype = next(dense.model.parameters()).dtype

    def measured(model: Any) -> dict[str, Any]:
        return heldout_perplexity(model, dense.tokenizer, texts, on_progress)

    return {"dense": measured(dense.model)} | {
        name: measured(load_weights(folder, dtype).to(dense.device))
        for name, folder in exports.items()
    }


def measure_perplexity(config: EvaluateConfig, progress: Progress) -> dict[str, Any]:
    """Perplexity of the model on `config.corpus`; with --against of both, by `model`, `against`."""

    def measured(stock: StockModel, update: Update) -> dict[str, Any]:
        text, window = packed_text(corpus, stock.tokenizer), corpus.window_in(stock.context)
        return perplexity(stock_nats(stock.model), text, window, corpus.windows_at_once, update)

    corpus = config.corpus
    sides = models.by_side(config, progress, measured, _of_gguf)
    return sides if "against" in sides else sides["model"]


def _of_gguf(file: Path, config: EvaluateConfig, update: Update) -> dict[str, Any]:
    from dotmoe.checkpoint.from_gguf import GgufFile  # an extra
    from dotmoe.llama_cpp import LlamaCppModel

    require_checksums(file.parent)
    source = checkpoint_folder(
        config.tokenizer or str(read_json(file.parent / RECORD_FILE)["source"])
    )
    window = config.corpus.window_in(GgufFile(file).size("context_length"))
    text = packed_text(config.corpus, AutoTokenizer.from_pretrained(source, local_files_only=True))
    with LlamaCppModel(file, context=window) as model:
        return perplexity(models.row_nats(model.logits), text, window, 1, update)


def measure_words(config: EvaluateConfig, progress: Progress) -> dict[str, Any]:
    """Perplexity a word of `config.corpus.text` at each window, of each model."""
    if config.corpus.max_tokens is not None:
        raise UserError(
            "--max-tokens cuts documents, and --word-perplexity scores whole ones. Leave it out, "
            "and give a shorter text."
        )
    texts: list[str] = []
    for piece in documents(DataConfig(data=config.corpus.text)):
        if isinstance(piece, Continuation):
            texts[-1] += piece
        else:
            texts.append(str(piece))

    def measured(stock: StockModel, update: Update) -> dict[str, Any]:
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

    return {
        **models.by_side(config, progress, measured),
        "unit": "word",
        "text": list(config.corpus.text),
        "protocol": "Rolling log-likelihood: each document tokenised whole, every token scored "
        "once, the last window of a document reaching back to be full; nats over words, words "
        "counted between white space.",
    }


def rolling_perplexity(
    nats: TokenNats,
    tokenizer: Any,
    texts: Sequence[str],
    window: int,
    on_progress: Update = no_update,
) -> dict[str, Any]:
    """Perplexity a word by rolling log-likelihood, as lm-evaluation-harness defines it.

    A document is preceded by the BOS token, or EOS where there is none, and tokenised whole with
    the tokenizer's own special tokens: where it adds a BOS itself there are two and the second is
    scored. Documents do not see each other. The model sees `window` tokens at once, 1 to its
    context; a document's last window reaches back so that it is full too, and scores only what no
    window scored before. `on_progress` is told tokens.

    Returns:
        `word_perplexity`, `bits_per_byte`, and the counts that they come from.
    """
    prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    encoded = [tokenizer(text, verbose=False).input_ids for text in texts]
    num_tokens = sum(map(len, encoded))
    if num_tokens == 0 or prefix is None:
        raise UserError("the text has no tokens, or the tokenizer no BOS or EOS. Give another.")
    total, done = 0.0, 0
    for ids in encoded:
        row = torch.tensor([[prefix, *ids]])
        for start in range(0, len(ids), window):
            end = min(start + window, len(ids))
            nats_T = nats(row[:, max(0, end - window) : end + 1])[0]
            total += float(nats_T[start - end :].sum())
            done += end - start
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
