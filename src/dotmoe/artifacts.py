"""The types that travel between stages, besides `ExpertLayout`."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dotmoe.models.family import Family, Widths, widths_of


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseModel:
    """A loaded dense checkpoint, frozen, in evaluation mode."""

    model: nn.Module
    """The Transformers causal language model."""
    tokenizer: Any
    """Its tokenizer (a `PreTrainedTokenizerBase`)."""
    family: Family
    folder: Path
    """Local folder that holds config, safetensors and tokenizer files."""
    source: str
    """What the user called it: a folder or a hub name."""
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
        return widths_of(self.model.config)


def __getattr__(name: str) -> Any:
    """`AlignState` has moved to `dotmoe.moe.assignment`; here until its last callers are moved."""
    if name != "AlignState":
        raise AttributeError(name)
    return importlib.import_module("dotmoe.moe.assignment").AlignState
