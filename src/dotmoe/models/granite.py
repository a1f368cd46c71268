"""Granite 3: LLaMA with constant factors on embeddings, residuals, attention scores and logits."""

from dataclasses import replace
from typing import Any

from dotmoe.models.llama import Llama
from dotmoe.models.traits import DecoderTraits, Multipliers


class Granite(Llama):
    """Granite 3.0 to 3.3, dense members."""

    model_type = "granite"

    def traits(self, config: Any) -> DecoderTraits:
        """See `Family.traits`."""
        plain = super().traits(config)
        is_usual = config.attention_multiplier == plain.head_dim**-0.5
        multipliers = Multipliers(
            embedding=float(config.embedding_multiplier),
            residual=float(config.residual_multiplier),
            attention=None if is_usual else float(config.attention_multiplier),
            logits_divisor=float(config.logits_scaling),
        )
        return replace(plain, multipliers=multipliers)
