"""Perplexity of whole checkpoints: any folder that stock Transformers loads."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dotmoe.artifacts import DenseModel
from dotmoe.data import DataConfig, Packed, TokenBlocks, documents
from dotmoe.errors import UserError
from dotmoe.evaluate.perplexity import (
    EvaluateConfig,
    PerplexityResult,
    packed_perplexity,
    perplexity,
)

Update = Callable[[int, int], None]


def evaluate_pair(
    dense: DenseModel,
    export: Path,
    heldout: TokenBlocks,
    text: tuple[str, ...],
    on_progress: Update,
) -> dict[str, Any]:
    """Perplexity of a dense model and of its export, as `dense` and `moe`, on the same windows.

    Args:
        dense: The dense model.
        export: Folder of the exported checkpoint; it runs in the dense model's dtype and device.
        heldout: Text that was not trained on; a window is a block.
        text: What to call that text.
        on_progress: Told windows done and windows in all, once for each model.
    """
    return evaluate_all(dense, {"moe": export}, heldout, text, on_progress)


def evaluate_all(
    dense: DenseModel,
    exports: Mapping[str, Path],
    heldout: TokenBlocks,
    text: tuple[str, ...],
    on_progress: Update,
) -> dict[str, Any]:
    """Perplexity of a dense model, as `dense`, and of exports by their names; see `evaluate_pair`.

    One export is in memory at a time, beside the dense model.
    """
    tokens = heldout.tokens_BT.flatten()
    num_bytes = len(dense.tokenizer.decode(tokens.tolist(), skip_special_tokens=True).encode())
    packed = Packed(tokens, tokens.numel() / max(1, num_bytes))
    config = EvaluateConfig(text=text, window=heldout.seq_len)
    dtype = next(dense.model.parameters()).dtype

    def measured(model: Any) -> dict[str, Any]:
        return packed_perplexity(model, dense.tokenizer, packed, config, on_progress).as_dict()

    results = {"dense": measured(dense.model)}
    for name, export in exports.items():
        results[name] = measured(stock_model(export, dense.device, dtype))
    return results


def evaluate_checkpoint(
    folder: Path,
    config: EvaluateConfig,
    *,
    device: torch.device,
    dtype: torch.dtype | Literal["auto"],
    on_progress: Update,
) -> PerplexityResult:
    """Perplexity of a dense or exported checkpoint on `config.text`."""
    if not config.text:
        raise UserError("--text names no file. Give a text to measure perplexity on.")
    model = stock_model(folder, device, dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    source = documents(DataConfig(data=config.text))
    return perplexity(model, tokenizer, source, config, on_progress)


def stock_model(folder: Path, device: torch.device, dtype: torch.dtype | Literal["auto"]) -> Any:
    """A checkpoint as plain Transformers loads it, in evaluation mode.

    Raises:
        UserError: A tensor is missing, which Transformers would fill with random numbers.
    """
    model, loaded = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, output_loading_info=True
    )
    missing = sorted(loaded["missing_keys"])
    if missing:
        raise UserError(
            f"{missing[0]} is not in the checkpoint {folder} ({len(missing)} missing in all), so "
            "it would be random. Get the checkpoint again."
        )
    return model.eval().to(device)
