"""Perplexity a token of anything that scores tokens, with its protocol beside the number."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from dotmoe.checkpoint.folder import checkpoint_folder
from dotmoe.data import DataConfig, TokenBlocks, documents, pack, separator_of
from dotmoe.errors import UserError
from dotmoe.evaluate.config import EvaluateConfig, TextConfig
from dotmoe.evaluate.models import gguf_file, loaded, model_folder
from dotmoe.evaluate.scoring import TokenNats, row_nats, stock_nats
from dotmoe.export.record import RECORD_FILE, require_intact
from dotmoe.files import read_json
from dotmoe.load import load_weights
from dotmoe.models.dense import DenseModel
from dotmoe.progress import Progress, Update, no_update


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Tokens to score, and how they were made."""

    tokens: Tensor
    """Token ids, one dimension."""
    tokens_per_byte: float
    """Of the same text in UTF-8: turns nats a token into bits a byte."""
    names: tuple[str, ...]
    joined: str
    """How documents became one row of tokens, the beginning of a sentence."""
    only_full_windows: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Perplexity:
    """A perplexity and everything needed to compare it with another."""

    loss: float
    """Mean cross-entropy in nats a token."""
    perplexity: float
    bits_per_byte: float
    """loss / ln 2 times the text's tokens a byte of UTF-8; comparable between tokenizers."""
    window: int
    tokens: int
    """Tokens scored."""
    unit: str = "token"
    text: tuple[str, ...]
    protocol: str
    """How the text was cut and scored, in one sentence."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, marked as measured."""
        return asdict(self) | {"text": list(self.text), "origin": "measured"}


def perplexity(
    nats: TokenNats, text: Text, window: int, batch_size: int = 8, on_progress: Update = no_update
) -> Perplexity:
    """Perplexity a token over windows of the text that do not overlap.

    Each token of a window but the first is predicted from those before it in the window. A last,
    shorter window counts from 2 tokens up, unless `text.only_full_windows`.

    A window has 2 tokens to the model's context; `nats` is given `batch_size` of them a call.
    `on_progress` is told windows done and windows in all.

    Raises:
        UserError: Nothing to score, or a loss that no working model has.
    """
    tokens = text.tokens
    if tokens.numel() < 2:
        raise UserError("the text has 1 token, and 2 are needed to score one. Give more text.")
    num_full = tokens.numel() // window
    tail = tokens[num_full * window :]
    if text.only_full_windows and not num_full:
        raise UserError(
            f"the text has {tokens.numel()} tokens, which fill no window of {window}. "
            "Give more text, or lower --window."
        )
    batches = list(torch.split(tokens[: num_full * window].view(num_full, window), batch_size))
    if tail.numel() >= 2 and not text.only_full_windows:
        batches.append(tail[None])
    total, scored, done = 0.0, 0, 0
    num_windows = sum(map(len, batches))
    for batch in filter(len, batches):
        nats_BT = nats(batch)
        total += float(nats_BT.sum())
        scored += nats_BT.numel()
        done += len(batch)
        on_progress(done, num_windows)
    loss = total / scored
    if not math.isfinite(loss) or loss > 100:
        raise UserError(
            f"the loss is {loss} nats a token, so the model is broken or its number format "
            "overflows. Load it as float32 to tell which."
        )
    return Perplexity(
        loss=loss,
        perplexity=math.exp(loss),
        bits_per_byte=loss / math.log(2) * text.tokens_per_byte,
        window=window,
        tokens=scored,
        text=text.names,
        protocol=(
            f"{text.joined} and cut into non-overlapping windows of {window} tokens; the first "
            f"token of each window is not scored; {scored:,} tokens scored; mean taken over tokens."
        ),
    )


def packed_text(config: TextConfig, tokenizer: Any, pieces: Iterable[str] | None = None) -> Text:
    r"""Tokens of `config.text`, joined as `config.protocol` says.

    packed: joined as for training, see `dotmoe.data.pack`. gptq: `"\n\n".join(lines)` tokenised
    whole with the tokenizer's own special tokens. There a line keeps its line end, and a blank one
    is empty: these are the rows of the data set `wikitext-2-raw-v1`, which the quantisation
    literature joins, made again from the file they were cut from.

    `pieces`, as `dotmoe.data.documents` streams them, are read instead of the sources.

    Raises:
        UserError: A source that is missing, damaged or empty.
    """
    pieces = documents(DataConfig(data=config.text)) if pieces is None else pieces
    if config.protocol == "packed":
        tokens, per_byte = pack(pieces, tokenizer, config.max_tokens)
        joined = f"Documents joined ({separator_of(tokenizer)})"
        return Text(tokens=tokens, tokens_per_byte=per_byte, names=config.text, joined=joined)
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
    return Text(
        tokens=tokens,
        tokens_per_byte=tokens.numel() / max(1, num_bytes),
        names=names,
        joined=f"Documents joined ({separator_of(tokenizer)})",
    )


def perplexities(
    dense: DenseModel,
    exports: Mapping[str, Path],
    heldout: TokenBlocks,
    names: tuple[str, ...],
    on_progress: Update = no_update,
) -> dict[str, Any]:
    """Perplexity of a dense model, as `dense`, and of exports by their names, on the same windows.

    Exports run in the dense model's dtype and on its device, one at a time beside it. A window is
    a block of the held-out text, which `names` calls by its name. `on_progress` is told windows
    done and windows in all, once for each model.
    """
    text = heldout_text(heldout, dense.tokenizer, names)
    dtype = next(dense.model.parameters()).dtype

    def measured(model: Any) -> dict[str, Any]:
        found = perplexity(stock_nats(model), text, heldout.seq_len, on_progress=on_progress)
        return found.as_dict()

    return {"dense": measured(dense.model)} | {
        name: measured(load_weights(folder, dtype).to(dense.device))
        for name, folder in exports.items()
    }


def measure_perplexity(config: EvaluateConfig, progress: Progress) -> dict[str, Any]:
    """Perplexity of the model on `config.corpus`; with --against of both, by `model`, `against`."""
    config.corpus.require_text()
    with progress.bar("evaluate") as update:
        found = {label: _measured(name, config, update) for label, name in config.names.items()}
    return found if "against" in found else found["model"]


def _measured(name: str, config: EvaluateConfig, update: Update) -> dict[str, Any]:
    file = gguf_file(Path(name))
    if file is not None:
        require_intact(file.parent)
        return {"name": name, "dtype": "gguf", **_of_gguf(file, config, update).as_dict()}
    stock = loaded(model_folder(name), config.load)
    window = config.corpus.window_in(stock.context)
    text = packed_text(config.corpus, stock.tokenizer)
    rows = config.corpus.windows_at_once
    found = perplexity(stock_nats(stock.model), text, window, rows, update)
    return {"name": name, "dtype": stock.dtype, **found.as_dict()}


def _of_gguf(file: Path, config: EvaluateConfig, update: Update) -> Perplexity:
    from dotmoe.export.gguf_file import GgufFile  # an extra
    from dotmoe.llama_cpp import LlamaCppModel

    opened = GgufFile(file)
    context = opened.metadata(f"{opened.arch}.context_length")
    if context is None:
        raise UserError(f"{file} states no context_length. Export it again.")
    window = config.corpus.window_in(int(context))
    text = packed_text(config.corpus, _tokenizer_of(file, config.tokenizer))
    with LlamaCppModel(file, context=window) as model:
        return perplexity(row_nats(model.logits), text, window, 1, update)


def _tokenizer_of(file: Path, name: str | None) -> Any:
    record = file.parent / RECORD_FILE
    if name is None and not record.is_file():
        raise UserError(
            f"{file} has no {RECORD_FILE} beside it that names the model it was made from. "
            "Name the model with --tokenizer."
        )
    source = read_json(record)["source"] if name is None else name
    return AutoTokenizer.from_pretrained(checkpoint_folder(str(source)), local_files_only=True)
