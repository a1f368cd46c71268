"""The types that travel between stages, besides `ExpertLayout`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dotmoe.errors import UserError
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


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignState:
    """What the alignment phase learns, always float32."""

    affinity_LNE: Float[Tensor, "L N E"]
    """Score of neuron n for expert e in each layer (A; "assignment logits" in the paper)."""
    router_LED: Float[Tensor, "L E D"]
    """Router rows."""
    step: int
    """Optimizer steps taken; 0 for an initial state."""

    def save(self, path: Path) -> None:
        """Write as one safetensors file."""
        tensors = {
            "affinity": self.affinity_LNE.cpu().contiguous(),
            "router": self.router_LED.cpu().contiguous(),
        }
        save_file(tensors, path, metadata={"format": "dotmoe-state-1", "step": str(self.step)})

    @classmethod
    def load(cls, path: Path, device: torch.device) -> "AlignState":
        """Read a file written by `save`.

        Raises:
            UserError: The file is missing, truncated or not a state.
        """
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                metadata = file.metadata() or {}
                return cls(
                    affinity_LNE=file.get_tensor("affinity"),
                    router_LED=file.get_tensor("router"),
                    step=int(metadata["step"]),
                )
        except (OSError, SafetensorError, KeyError) as error:
            raise UserError(
                f"{path} cannot be read as an alignment state ({error}). Delete its folder's "
                "finish marker to run that stage again."
            ) from error
