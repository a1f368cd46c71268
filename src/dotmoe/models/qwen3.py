"""Qwen3: LLaMA with an RMSNorm on each query and key head and an explicit head width."""

from dataclasses import replace
from typing import Any

from dotmoe.models.llama import Llama
from dotmoe.models.qwen2 import sliding_window
from dotmoe.models.traits import DecoderTraits


class Qwen3(Llama):
    """Qwen3, dense members."""

    model_type = "qwen3"

    def traits(self, config: Any) -> DecoderTraits:
        """See `Family.traits`."""
        return replace(
            super().traits(config), qk_norm="head", sliding_window=sliding_window(config)
        )
