"""Mistral: LLaMA with an optional sliding attention window on every layer."""

from typing import Any

from dotmoe.models.llama import Llama, head_dim
from dotmoe.models.traits import AttentionTraits


class Mistral(Llama):
    """Mistral 7B and its kin."""

    model_type = "mistral"

    def attention(self, config: Any) -> AttentionTraits:
        """See `Family.attention`."""
        return AttentionTraits(
            qkv_bias=False,
            qk_norm=False,
            head_dim=head_dim(config),
            sliding_window=getattr(config, "sliding_window", None),
        )
