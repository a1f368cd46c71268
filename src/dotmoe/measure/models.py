"""Which model a user means, and that model loaded as stock Transformers loads it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from dotmoe.checkpoint_folder import checkpoint_folder, require_checkpoint
from dotmoe.device import resolved_device
from dotmoe.errors import UserError
from dotmoe.evaluate import stock_model
from dotmoe.export import require_intact
from dotmoe.load import LoadConfig, resolved_dtype
from dotmoe.measure.config import MeasureConfig
from dotmoe.run_folder import export_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class StockModel:
    """A loaded checkpoint."""

    folder: Path
    model: Any
    tokenizer: Any

    @property
    def dtype(self) -> str:
        """Number format of its weights in memory."""
        return str(self.model.dtype).removeprefix("torch.")


def model_folder(name: str) -> Path:
    """Folder of a checkpoint that stock Transformers can load.

    Raises:
        UserError: There is none under that name, or it is a damaged export.
    """
    local = export_folder(Path(name))
    folder = local if local.is_dir() else checkpoint_folder(name)
    require_checkpoint(folder)
    require_intact(folder)
    return folder


def gguf_file(path: Path) -> Path | None:
    """The GGUF meant by a path: the file itself, or the only one in a folder; None: none."""
    if path.is_file() and path.suffix == ".gguf":
        return path
    found = sorted(path.glob("*.gguf")) if path.is_dir() else []
    return found[0] if len(found) == 1 else None


def loaded(folder: Path, load: LoadConfig) -> StockModel:
    """Load a checkpoint.

    Raises:
        UserError: A device that is not there, or a tensor that is missing.
    """
    device = resolved_device(load.device)
    return StockModel(
        folder=folder,
        model=stock_model(folder, device, resolved_dtype(load.dtype, device)),
        tokenizer=AutoTokenizer.from_pretrained(folder, local_files_only=True),
    )


def named_folders(config: MeasureConfig, what: str) -> dict[str, Path]:
    """Folders of the model and, if it is named, of the one to measure beside it.

    Args:
        config: What was asked for.
        what: What is to be measured, for the message.

    Raises:
        UserError: One is a GGUF, or there is no model of that name.
    """
    names = {"model": config.model} | ({"against": config.against} if config.against else {})
    for name in names.values():
        if gguf_file(Path(name)) is not None:
            raise UserError(
                f"{name} is a GGUF, of which only the perplexity is measured, not {what}. Name the "
                "Transformers export of the same run."
            )
    return {label: model_folder(name) for label, name in names.items()}
