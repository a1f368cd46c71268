"""A dense checkpoint as the program passes it on: `DenseModel`."""

import os.path
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from dotmoe.models.family import Family
from dotmoe.models.hf_config import Widths, widths_of
from dotmoe.models.traits import DecoderTraits

Weights = Literal["memory", "shards", "disk", "meta"]
"""Where weights are: whole on the device, in shards on all ranks (FSDP2), in the checkpoint's files
(each part is read when it runs, see `on_disk`), or nowhere (shapes on the meta device)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseModel:
    """A frozen dense checkpoint in evaluation mode; it may lack weights, tokenizer or folder."""

    model: nn.Module
    """The Transformers causal language model."""
    weights: Weights
    """Where the weights of `model` are, as stated by whoever made it."""
    family: Family
    source: str
    """The name that the user gave: a folder or GGUF file, or a hub name, here with its commit."""
    tokenizer: Any = None
    """Tokenizer of the model (a `PreTrainedTokenizerBase`)."""
    folder: Path = Path()
    """Local folder that holds config, safetensors and tokenizer files."""
    changes: Path | None = None
    """Folder of a repair's `*/weights.safetensors`, which replace tensors of `folder`."""
    revision: str | None = None
    """Commit of the checkpoint if it came from the hub, else None."""

    @property
    def name(self) -> str:
        """Name to publish: that on the hub, or of a local model the last part of its path."""
        if self.revision is not None:
            return self.source.partition("@")[0]
        return os.path.basename(os.path.abspath(self.source))

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.model.parameters()).device

    @property
    def config(self) -> Any:
        """Hugging Face config of the model."""
        return self.model.config

    @property
    def traits(self) -> DecoderTraits:
        """Features of the decoder outside its FFNs."""
        return self.family.traits(self.model)

    @property
    def widths(self) -> Widths:
        """Sizes of the model."""
        return widths_of(self.config)

    def require(self, *places: Weights) -> None:
        """Raise a `ValueError` if the weights are elsewhere than in `places`."""
        if self.weights not in places:
            raise ValueError(f"weights of {self.source} are in {self.weights}, not {places}")
