"""Perplexity of anything that scores tokens, and of an export at several k."""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dotmoe.common.errors import UserError
from dotmoe.common.files import Values
from dotmoe.common.progress import Progress, Update, no_update
from dotmoe.common.tables import Table, figure, percent, table_of
from dotmoe.export.architectures import FORMATS
from dotmoe.export.record import ExportRecord, active_experts_of, require_checksums
from dotmoe.measure.config import EvaluateConfig, TextConfig
from dotmoe.measure.evaluate.difference import (
    difference,
    error_over,
    nats_with_error,
    scored_in,
    shown_difference,
)
from dotmoe.measure.evaluate.models import (
    StockModel,
    TokenNats,
    by_side,
    dense_model_of,
    loaded,
    loading,
    model_folder,
    row_nats,
    stock_nats,
)
from dotmoe.models.identity import FINGERPRINT, fingerprint
from dotmoe.models.load import load_weights
from dotmoe.models.source import checkpoint_folder
from dotmoe.models.targets import TARGETS
from dotmoe.models.tokenizer import load_tokenizer
from dotmoe.text.blocks import TokenBlocks
from dotmoe.text.config import DataConfig
from dotmoe.text.files import whole_documents
from dotmoe.text.packing import pack, separator_of
from dotmoe.text.rows import Document
from dotmoe.text.sources import documents

FEW_WINDOWS = 16
"""Fewer windows than this give a rough standard error, and a result says so."""
Heldout = Mapping[tuple[str, ...], TokenBlocks]
"""Blocks of held-out text, by the names of the text."""


class ScoredText(NamedTuple):
    """Tokens to score, and how they were made."""

    tokens: Tensor
    """Token ids, one dimension."""
    tokens_per_byte: float
    """Tokens per byte of the text in UTF-8; converts nats per token to bits per byte."""
    names: tuple[str, ...]
    joined: str
    """How documents were joined to one row of tokens: the beginning of the protocol sentence."""
    only_full_windows: bool = False
    text_sha256: str | None = None
    """SHA-256 of the text, if it was read as a whole."""


def perplexity(
    nats: TokenNats,
    text: ScoredText,
    window: int,
    batch_size: int = 8,
    on_progress: Update = no_update,
) -> Values:
    """Perplexity per token over non-overlapping windows of the text, 2 tokens to the context.

    Each token of a window but the first is predicted from those before it in the window. A shorter
    last window counts if it has 2 tokens or more, unless `text.only_full_windows`. `nats` gets
    `batch_size` windows per call; `on_progress` gets the number of tokens.

    Returns:
        `loss` (mean nats per token), its standard error `stderr` over windows (None if there is one
        window), `window_losses` (mean of each window), `perplexity`, `bits_per_byte` (comparable
        between tokenizers), and how it was measured; `ids_sha256` is of all token ids.

    Raises:
        UserError: There is nothing to score, or the loss is over 100 or not finite.
    """
    batches = _batches_of(text, window, batch_size)
    num_tokens = sum(batch.numel() for batch in batches)
    total = 0.0
    scored, done = 0, 0
    window_losses = list[float]()
    for batch in batches:
        nats_BT = nats(batch)
        window_losses += [round(each, 6) for each in nats_BT.mean(dim=1).tolist()]
        total += float(nats_BT.sum())
        scored += nats_BT.numel()
        done += batch.numel()
        on_progress(done, num_tokens)
    loss = total / scored
    if not math.isfinite(loss) or loss > 100:
        raise UserError(
            f"the loss is {loss} nats per token, so the model is broken or its dtype overflows. "
            "Load it as float32 to find out which."
        )
    result = {
        "origin": "measured",
        "loss": loss,
        "window_losses": window_losses,
        "perplexity": math.exp(loss),
        "bits_per_byte": loss / math.log(2) * text.tokens_per_byte,
        "window": window,
        "tokens": scored,
        "unit": "token",
        "text": list(text.names),
        "text_sha256": text.text_sha256,
        "ids_sha256": _sha256_of(batches),
        "protocol": f"{text.joined} and cut into non-overlapping windows of {window} tokens; the "
        f"first token of each window is not scored; {scored:,} tokens scored; mean taken over "
        f"tokens, {_error_in_words(len(window_losses))}.",
    }
    return result | {"stderr": error_over(window_losses, scored_in(result))}


def _error_in_words(windows: int) -> str:
    """What the standard error over so many windows is, in the protocol sentence."""
    if windows == 1:
        error = "standard error over 1 window"
    else:
        error = f"standard error over {windows} windows"
    if windows < FEW_WINDOWS:
        error += f", fewer than {FEW_WINDOWS}: a rough one"
    return error


def _batches_of(text: ScoredText, window: int, batch_size: int) -> list[Tensor]:
    """The windows of a text, [B, T] each time; the last, shorter one alone."""
    full, rest = divmod(text.tokens.numel(), window)
    whole = text.tokens[: full * window].view(full, window)
    batches = list(torch.split(whole, min(batch_size, full))) if full else []
    if rest >= 2 and not text.only_full_windows:
        batches.append(text.tokens[-rest:][None])
    if not batches:
        raise UserError(
            f"{text.tokens.numel()} tokens of text fill no window of {window}. Give more text, or "
            "lower --window."
        )
    return batches


def packed_text(config: TextConfig, tokenizer: Any) -> ScoredText:
    """Tokens of `config.text`, joined as `config.protocol` specifies."""
    if config.protocol == "packed":
        return _packed_documents(config, tokenizer)
    return _joined_lines(config, tokenizer)


def _packed_documents(config: TextConfig, tokenizer: Any) -> ScoredText:
    """The documents tokenised one by one, as for training: see `dotmoe.text.packing.pack`."""
    digest = hashlib.sha256()
    read = _hashed(documents(DataConfig(data=config.text), tokenizer), digest)
    tokens, tokens_per_byte = pack(read, tokenizer, config.max_tokens)
    is_whole = config.max_tokens is None or len(tokens) < config.max_tokens
    return ScoredText(
        tokens,
        tokens_per_byte,
        names=config.text,
        joined=f"Documents joined ({separator_of(tokenizer)})",
        text_sha256=digest.hexdigest() if is_whole else None,
    )


def _joined_lines(config: TextConfig, tokenizer: Any) -> ScoredText:
    r"""`"\n\n".join(lines)` tokenised whole, with the tokenizer's own special tokens, as GPTQ does.

    Lines keep their line ends, and blank lines become empty: this restores the rows of the data set
    `wikitext-2-raw-v1` from its file. Each document begins a line, as rows do.
    """
    digest = hashlib.sha256()
    read = whole_documents(documents(DataConfig(data=config.text)))
    texts = [document.text for document in _hashed(read, digest)]
    lines = [line for text in texts for line in text.removesuffix("\n").split("\n")]
    rows = "\n\n".join(line + "\n" if line.strip() else "" for line in lines)
    ids = tokenizer(rows, verbose=False).input_ids
    num_bytes = len("".join(texts).encode())
    if not ids or not num_bytes:
        raise UserError("the data holds no text. Name sources with text in them.")
    tokens = torch.tensor(ids[: config.max_tokens], dtype=torch.int32)
    is_whole = len(tokens) == len(ids)
    return ScoredText(
        tokens,
        tokens_per_byte=len(ids) / num_bytes,
        names=config.text,
        joined=r'Lines joined by "\n\n", tokenised whole, the last unfilled window dropped,',
        only_full_windows=True,
        text_sha256=digest.hexdigest() if is_whole else None,
    )


def _hashed(documents: Iterable[Document], digest: Any) -> Iterator[Document]:
    """The documents; a hash gets each one as it is read."""
    for document in documents:
        text = document.text
        digest.update(f"{len(text)}:{text}".encode(errors="surrogatepass"))
        yield document


def _sha256_of(batches: Iterable[Tensor]) -> str:
    """SHA-256 of token ids in their order, as int32."""
    digest = hashlib.sha256()
    for batch in batches:
        digest.update(batch.to("cpu", torch.int32).contiguous().numpy().data)
    return digest.hexdigest()


def cut_to_context(texts: Heldout, context: int) -> dict[tuple[str, ...], TokenBlocks]:
    """The blocks, cut into shorter ones if a block has more tokens than a context."""
    cut = dict[tuple[str, ...], TokenBlocks]()
    for names, blocks in texts.items():
        whole = blocks.num_tokens // context
        shorter = blocks.tokens_BT.flatten()[: whole * context].view(whole, context)
        cut[names] = TokenBlocks(shorter) if blocks.seq_len > context else blocks
    return cut


def heldout_perplexity(
    model: Any, tokenizer: Any, texts: Heldout, on_progress: Update = no_update
) -> Values:
    """`perplexity` of a stock model on the first text; a second text's is added as `other`."""
    joined = f"Documents joined ({separator_of(tokenizer)})"
    results = []
    for names, blocks in texts.items():
        tokens = blocks.tokens_BT.flatten()
        num_bytes = len(tokenizer.decode(tokens.tolist(), skip_special_tokens=True).encode())
        text = ScoredText(tokens, tokens.numel() / max(1, num_bytes), names, joined)
        results.append(perplexity(stock_nats(model), text, blocks.seq_len, on_progress=on_progress))
    return results[0] | ({"other": results[1]} if len(results) > 1 else {})


def export_perplexity(
    folder: Path,
    tokenizer: Any,
    texts: Heldout,
    on_progress: Update = no_update,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Values:
    """`heldout_perplexity` of an export, which is in memory only meanwhile."""
    model: Any = load_weights(folder, dtype).to(device)
    return heldout_perplexity(model, tokenizer, texts, on_progress)


def measure_perplexity(config: EvaluateConfig, progress: Progress) -> Values:
    """`perplexity` of each model on `config.corpus`; for a single model, its values alone."""
    corpus = config.corpus

    def measured(stock: StockModel, update: Update) -> Values:
        text = packed_text(corpus, stock.tokenizer)
        window = corpus.window_in(stock.context)
        return perplexity(stock_nats(stock.model), text, window, corpus.windows_at_once, update)

    def of_gguf(file: Path, context: int, update: Update) -> Values:
        from dotmoe.export.llama_cpp import LlamaCppModel  # an optional package

        require_checksums(file.parent)
        name = config.tokenizer or dense_model_of(file.parent, "--tokenizer")
        folder = checkpoint_folder(name)
        with loading(folder):
            tokenizer = load_tokenizer(folder)
        window = corpus.window_in(context)
        text = packed_text(corpus, tokenizer)
        with LlamaCppModel(file, context=window) as model:
            return perplexity(row_nats(model.logits), text, window, 1, update)

    sides = by_side(config, progress, measured, of_gguf)
    return sides if config.against else sides["model"]


def ks_of_text_curve(num_experts: int, active_experts: int) -> tuple[int, ...]:
    """Values of k for a curve, ascending: 1/8 to 6/8 of E, E itself, and the model's own k."""
    ks = {max(1, round(eighths * num_experts / 8)) for eighths in (1, 2, 3, 4, 6, 8)}
    return tuple(sorted(ks | {active_experts}))


def measure_curve(config: EvaluateConfig, progress: Progress) -> Values:
    """Perplexity of an export on `config.corpus` at several k, and the parameters active at each.

    k = E is always among them: it computes with all weights that were split, the dense model's
    unless `all_experts.model` states otherwise. Without `config.curve` the others are those of
    `ks_of_text_curve`.
    """
    folder = model_folder(config.model)
    record = ExportRecord.load(folder)
    _require_free_k(folder, record)
    now = active_experts_of(folder, record)  # config.json may be edited
    chosen = config.curve or ks_of_text_curve(record.num_experts, now)
    if max(chosen) > record.num_experts:
        raise UserError(
            f"curve has k = {max(chosen)}, but {folder} has {record.num_experts} experts a layer. "
            f"Choose 1 to {record.num_experts}."
        )
    ks = sorted({*chosen, record.num_experts})
    stock = loaded(folder, config.load)
    measured = _perplexity_by_k(stock, record, ks, config.corpus, progress)
    whole = measured[record.num_experts]
    all_experts = "other weights" if record.is_finetuned or record.dropped_size else "dense"
    return {
        **{name: getattr(record, name) for name in ("name", "format", "source")},
        FINGERPRINT: fingerprint(folder),
        "dtype": stock.dtype,
        "num_experts": record.num_experts,
        "active_experts": now,
        "target": record.target,
        "dense_parameters": record.parameters["dense"],
        "all_experts": {"model": all_experts, "perplexity": whole["perplexity"]},
        "points": [_point(record, active, each, whole) for active, each in measured.items()],
        **{name: whole[name] for name in ("text", "window", "tokens", "unit", "protocol")},
    }


def _require_free_k(folder: Path, record: ExportRecord) -> None:
    """Raise a `UserError` if the format of an export fixes its k."""
    if record.active_experts_editable:
        return
    free = [name for name, output in FORMATS.items() if output.active_experts_editable]
    remedy = f"Export the run as {' or '.join(free)}."
    if record.format in free:  # attention has a k of its own
        remedy = "Convert with FFNs or attention as the only target."
    raise UserError(
        f"{folder} is a {record.format}, whose k is fixed at {record.active_experts}, so it "
        f"has no curve. {remedy}"
    )


def _perplexity_by_k(
    stock: StockModel,
    record: ExportRecord,
    ks: Iterable[int],
    corpus: TextConfig,
    progress: Progress,
) -> dict[int, Values]:
    """`perplexity` of an export at each k, which is set in the loaded model."""
    text = packed_text(corpus, stock.tokenizer)
    window = corpus.window_in(stock.context)
    layers = range(record.first_dense_layers, record.num_layers)
    nats = stock_nats(stock.model)
    measured = dict[int, Values]()
    for active in ks:
        FORMATS[record.format].run_active_experts(stock.model, layers, active)
        with progress.bar(f"k = {active}", tokens=1) as update:
            measured[active] = perplexity(nats, text, window, corpus.windows_at_once, update)
    return measured


def _point(record: ExportRecord, active: int, result: Values, whole: Values) -> Values:
    """One point of a curve: `result` at `active` experts, beside `whole`, that of all experts."""
    share, parameters = record.active_at(active)
    change, stderr = difference(result, whole)
    return {
        "active_experts": active,
        "active_fraction": share,
        "active_parameters": parameters,
        **{key: result[key] for key in ("loss", "stderr", "perplexity", "bits_per_byte")},
        "loss_above_all_experts": change,
        "loss_above_all_experts_stderr": stderr,
    }


def perplexity_table(models: Mapping[str, Values]) -> Table:
    """Table of models' perplexities on one text; the others are compared with the first.

    The note says which are not comparable, and why.
    """
    rows = [result | {"model": name} for name, result in models.items()]
    first, *others = rows
    unit = first["unit"]
    than_first = f"above {Path(first['model']).name}"
    above = {row["model"]: shown_difference(row, first) for row in rows}
    notes = dict.fromkeys([_protocol(first), *(note for _, note in above.values())])
    columns: dict[str, Callable[[Values], str]] = {
        "model": lambda row: row["model"],
        "perplexity": lambda row: f"{row['perplexity']:.3f}",
        f"nats per {unit}": lambda row: nats_with_error(row["loss"], row.get("stderr"), ".4f"),
        than_first: lambda row: above[row["model"]][0],
        "bits per byte": lambda row: figure(row["bits_per_byte"]),
    }
    if not others:
        del columns[than_first]
    return table_of(
        rows,
        columns,
        title=f"Perplexity per {unit}, windows of {first['window']:,}, {first['tokens']:,} tokens",
        note=" ".join(sentence for sentence in notes if sentence),
    )


def curve_table(curve: Values) -> Table:
    """Table of an export's perplexity at several k."""
    marks = {curve["active_experts"]: " (now)"}
    marks[curve["num_experts"]] = f" ({curve['all_experts']['model']})"
    whole = TARGETS[curve.get("target", "ffn")].whole  # measurements of other versions lack it

    def above_all_experts(point: Values) -> str:
        stderr = point.get("loss_above_all_experts_stderr")
        return nats_with_error(point["loss_above_all_experts"], stderr, "+.4f")

    return table_of(
        curve["points"],
        {
            "k": lambda point: f"{point['active_experts']}{marks.get(point['active_experts'], '')}",
            f"of the {whole}": lambda point: percent(point["active_fraction"]),
            "active parameters": lambda point: f"{point['active_parameters']:,}",
            "of all": lambda point: percent(point["active_parameters"] / curve["dense_parameters"]),
            "perplexity": lambda point: f"{point['perplexity']:.3f}",
            f"nats above k = {curve['num_experts']}": above_all_experts,
        },
        title=f"Perplexity per {curve['unit']} at several k",
        note=_protocol(curve),
    )


def text_names(result: Values) -> str:
    """Names of the texts that were measured on, without their folders."""
    return ", ".join(Path(text).name for text in result["text"])


def _protocol(result: Values) -> str:
    return f"Text: {text_names(result)}. {result['protocol']}"
