"""Perplexity a word at several windows (tab:seqlen_ppl)."""

from typing import Any

from dotmoe.data import DataConfig, documents
from dotmoe.errors import UserError
from dotmoe.evaluate import rolling_perplexity
from dotmoe.evaluate.rolling import PAPER_WINDOWS, require_window, whole_documents
from dotmoe.measure.config import MeasureConfig
from dotmoe.measure.models import loaded, named_folders
from dotmoe.measure.perplexity import require_text
from dotmoe.narration import Update
from dotmoe.run_folder import provenance


def measure_words(config: MeasureConfig, on_progress: Update) -> dict[str, Any]:
    """Perplexity a word of `config.evaluate.text` at each window, as plain values.

    The two conventions of WikiText-2 are in docs/evaluation.md.

    Raises:
        UserError: No model or text, or a window beyond the context of a model.
    """
    require_text(config.evaluate)
    if config.evaluate.max_tokens is not None:
        raise UserError(
            "--max-tokens cuts documents, and --word-perplexity scores whole ones. Leave it out, "
            "and give a shorter text."
        )
    folders = named_folders(config, "perplexity a word")
    texts = whole_documents(documents(DataConfig(data=config.evaluate.text)))
    measured: dict[str, Any] = {}
    for label, folder in folders.items():
        stock = loaded(folder, config.load)
        context = int(stock.model.config.max_position_embeddings)
        windows = config.word_perplexity or tuple(w for w in PAPER_WINDOWS if w <= context)
        for window in windows or (context,):
            require_window(window, context)
        measured[label] = {
            "name": config.model if label == "model" else config.against,
            "dtype": stock.dtype,
            "windows": [
                rolling_perplexity(
                    stock.model, stock.tokenizer, texts, window, config.evaluate.text, on_progress
                ).as_dict()
                for window in windows or (context,)
            ],
        }
    return {"origin": "measured", **measured, "provenance": provenance(seed=0)}
