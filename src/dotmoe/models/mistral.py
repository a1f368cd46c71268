"""Mistral: LLaMA with an optional sliding attention window on every layer."""

from typing import Any

from dotmoe.models.llama import Llama, head_dim
from dotmoe.models.traits import DecoderTraits


class Mistral(Llama):
    """Mistral 7B and its kin."""

    model_type = "mistral"

    def traits(self, config: Any) -> DecoderTraits:
        """See `Family.traits`."""
        return DecoderTraits(head_dim=head_dim(config), sliding_window=config.sliding_window)
