"""The types that travel between stages, besides `ExpertLayout`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

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
    def config(self) -> Any:
        """Its Hugging Face config."""
        return self.model.config

    @property
    def widths(self) -> Widths:
        """Its sizes."""
        return widths_of(self.model.config)


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignState:
    """What the alignment phase learns, always float32."""

    affinity_LNE: Float[Tensor, "L N E"]
    """Score of neuron n for expert e in each layer (A; "assignment logits" in the paper)."""
    router_LED: Float[Tensor, "L E D"]
    """Router rows."""
    step: int
    """Optimizer steps taken; 0 for an initial state."""
