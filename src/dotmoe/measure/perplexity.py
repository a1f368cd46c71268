"""Perplexity of whatever a user can name: dense checkpoint, export, run folder, or GGUF file."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from dotmoe.checkpoint_folder import checkpoint_folder, json_object
from dotmoe.device import resolved_device
from dotmoe.errors import UserError
from dotmoe.evaluate import EvaluateConfig, PerplexityResult, evaluate_checkpoint
from dotmoe.evaluate.perplexity import packed_text
from dotmoe.export.record import RECORD_FILE
from dotmoe.load import resolved_dtype
from dotmoe.measure.config import MeasureConfig
from dotmoe.measure.models import gguf_file, model_folder
from dotmoe.narration import Update


def measure(config: MeasureConfig, on_progress: Update) -> PerplexityResult:
    """Perplexity of a model on `config.evaluate.text`, by one protocol for all runtimes.

    Raises:
        UserError: No such model or text, or one that does not fit the other.
    """
    require_text(config.evaluate)
    return _measured(config.model, config, on_progress)


def measure_both(config: MeasureConfig, on_progress: Update) -> dict[str, PerplexityResult]:
    """`measure`, of `config.against` too if it is named; as `model` and `against`."""
    require_text(config.evaluate)
    names = {"model": config.model} | ({"against": config.against} if config.against else {})
    return {label: _measured(name, config, on_progress) for label, name in names.items()}


def require_text(config: EvaluateConfig) -> None:
    """Refuse to measure on nothing.

    Raises:
        UserError: No text is named.
    """
    if not config.text:
        raise UserError("--text names no file. Give a text to measure on.")


def _measured(name: str, config: MeasureConfig, on_progress: Update) -> PerplexityResult:
    file = gguf_file(Path(name))
    if file is not None:
        return _of_gguf(file, config)
    folder = model_folder(name)
    device = resolved_device(config.load.device)
    return evaluate_checkpoint(
        folder,
        config.evaluate,
        device=device,
        dtype=resolved_dtype(config.load.dtype, device),
        on_progress=on_progress,
    )


def _of_gguf(file: Path, config: MeasureConfig) -> PerplexityResult:
    from dotmoe.gguf_export import LlamaCppModel  # an extra

    tokenizer = _tokenizer_of(file, config.tokenizer)
    packed = packed_text(config.evaluate, tokenizer)
    window = config.evaluate.window or min(2048, int(tokenizer.model_max_length))
    with LlamaCppModel(file, context=window) as model:
        return model.perplexity(tokenizer, packed, config.evaluate)


def _tokenizer_of(file: Path, name: str | None) -> Any:
    record = file.parent / RECORD_FILE
    if name is None and not record.is_file():
        raise UserError(
            f"{file} has no {RECORD_FILE} beside it that names the model it was made from. "
            "Name the model with --tokenizer."
        )
    source = json_object(record)["source"] if name is None else name
    return AutoTokenizer.from_pretrained(checkpoint_folder(str(source)), local_files_only=True)
