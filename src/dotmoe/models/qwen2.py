"""Qwen2 and Qwen2.5: LLaMA with biases on the query, key and value projections."""

from typing import Any

from dotmoe.models.llama import Llama, head_dim
from dotmoe.models.traits import DecoderTraits


def sliding_window(config: Any) -> int | None:
    """Window of a Qwen config, or None where no layer has one.

    Layers from `max_window_layers` on slide, if `use_sliding_window` is true. Full attention equals
    that of all layers up to the window.
    """
    return config.sliding_window if "sliding_attention" in config.layer_types else None


class Qwen2(Llama):
    """Qwen2 and Qwen2.5."""

    model_type = "qwen2"

    def traits(self, config: Any) -> DecoderTraits:
        """See `Family.traits`."""
        return DecoderTraits(
            head_dim=head_dim(config), qkv_bias=True, sliding_window=sliding_window(config)
        )
