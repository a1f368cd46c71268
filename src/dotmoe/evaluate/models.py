"""Which model a user means, and that model loaded as stock Transformers loads it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from dotmoe.checkpoint.folder import checkpoint_folder, require_checkpoint
from dotmoe.distributed import resolved_device
from dotmoe.errors import UserError
from dotmoe.evaluate.config import EvaluateConfig
from dotmoe.export import require_intact
from dotmoe.load import LoadConfig, load_weights, resolved_dtype
from dotmoe.run_folder import export_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class StockModel:
    """A loaded checkpoint."""

    model: Any
    tokenizer: Any

    @property
    def dtype(self) -> str:
        """Number format of its weights in memory."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def context(self) -> int:
        """Tokens that it can see at once."""
        return int(self.model.config.max_position_embeddings)


def loaded(folder: Path, load: LoadConfig) -> StockModel:
    """A checkpoint and its tokenizer."""
    device = resolved_device(load.device)
    return StockModel(
        model=load_weights(folder, resolved_dtype(load.dtype, device)).to(device),
        tokenizer=AutoTokenizer.from_pretrained(folder, local_files_only=True),
    )


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


def named_folders(config: EvaluateConfig) -> dict[str, Path]:
    """Folders of the models to measure, by `model` and `against`.

    Raises:
        UserError: One is a GGUF, or there is no model of that name.
    """
    for name in config.names.values():
        if gguf_file(Path(name)) is not None:
            raise UserError(
                f"{name} is a GGUF, of which only the perplexity is measured, not "
                f"{config.measurement.replace('_', ' ')}. Name the Transformers export of the "
                "same run."
            )
    return {label: model_folder(name) for label, name in config.names.items()}


def by_side(
    config: EvaluateConfig, measure: Callable[[StockModel], dict[str, Any]]
) -> dict[str, Any]:
    """What `measure` gives of each model, as `model` and `against`, with its name and dtype."""

    def measured(label: str, folder: Path) -> dict[str, Any]:
        stock = loaded(folder, config.load)
        return {"name": config.names[label], "dtype": stock.dtype, **measure(stock)}

    return {label: measured(label, folder) for label, folder in named_folders(config).items()}
