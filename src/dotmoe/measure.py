"""Perplexity of whatever a user can name: dense checkpoint, export, run folder, or GGUF file."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from transformers import AutoTokenizer
from tyro.conf import Positional

from dotmoe.checkpoint_folder import checkpoint_folder, json_object, require_checkpoint
from dotmoe.data import DataConfig, documents, pack
from dotmoe.device import resolved_device
from dotmoe.errors import UserError
from dotmoe.evaluate import EvaluateConfig, PerplexityResult, evaluate_checkpoint
from dotmoe.export.record import RECORD_FILE
from dotmoe.load import LoadConfig, resolved_dtype
from dotmoe.narration import Update
from dotmoe.run_folder import export_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureConfig:
    """What to measure."""

    model: Annotated[Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Dense model, exported checkpoint, run folder, or GGUF (the file, or the folder it was
    exported to)."""
    tokenizer: str | None = None
    """Model whose tokenizer cuts the text; for a GGUF only. Default: the one it was made from."""
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    load: LoadConfig = field(default_factory=LoadConfig)


def measure(config: MeasureConfig, on_progress: Update) -> PerplexityResult:
    """Perplexity of a model on `config.evaluate.text`, by one protocol for all runtimes.

    Raises:
        UserError: No such model or text, or one that does not fit the other.
    """
    file = gguf_file(Path(config.model))
    if file is not None:
        return _of_gguf(file, config)
    folder = model_folder(config.model)
    device = resolved_device(config.load.device)
    return evaluate_checkpoint(
        folder,
        config.evaluate,
        device=device,
        dtype=resolved_dtype(config.load.dtype, device),
        on_progress=on_progress,
    )


def model_folder(name: str) -> Path:
    """Folder of a checkpoint that stock Transformers can load.

    Raises:
        UserError: There is none under that name.
    """
    local = export_folder(Path(name))
    folder = local if local.is_dir() else checkpoint_folder(name)
    require_checkpoint(folder)
    return folder


def gguf_file(path: Path) -> Path | None:
    """The GGUF meant by a path: the file itself, or the only one in a folder; None: none."""
    if path.is_file() and path.suffix == ".gguf":
        return path
    found = sorted(path.glob("*.gguf")) if path.is_dir() else []
    return found[0] if len(found) == 1 else None


def _of_gguf(file: Path, config: MeasureConfig) -> PerplexityResult:
    from dotmoe.gguf_export import LlamaCppModel  # an extra

    if not config.evaluate.text:
        raise UserError("--text names no file. Give a text to measure perplexity on.")
    tokenizer = _tokenizer_of(file, config.tokenizer)
    text = documents(DataConfig(data=config.evaluate.text))
    packed = pack(text, tokenizer, config.evaluate.max_tokens)
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
