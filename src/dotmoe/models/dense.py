"""A dense checkpoint, loaded or only described."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dotmoe.models.family import Family, Widths, widths_of


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseModel:
    """A dense checkpoint, frozen, in evaluation mode."""

    model: nn.Module
    """The Transformers causal language model; on the meta device where it is only described."""
    tokenizer: Any
    """Its tokenizer (a `PreTrainedTokenizerBase`)."""
    family: Family
    folder: Path
    """Local folder that holds config, safetensors and tokenizer files."""
    source: str
    """What the user called it: a folder, a GGUF file or a hub name."""
    revision: str | None
    """Commit of a hub checkpoint, if it came from there."""

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return next(self.model.parameters()).device

    @property
    def config(self) -> Any:
        """Its Hugging Face config."""
        return self.model.config

    @property
    def widths(self) -> Widths:
        """Its sizes."""
        return widths_of(self.config)
