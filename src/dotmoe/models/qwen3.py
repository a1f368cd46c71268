"""Qwen3: LLaMA with an RMSNorm on each query and key head and an explicit head width."""

from typing import Any

from dotmoe.models.llama import Llama, head_dim
from dotmoe.models.qwen2 import sliding_window
from dotmoe.models.traits import AttentionTraits


class Qwen3(Llama):
    """Qwen3, dense members."""

    model_type = "qwen3"

    def refusal(self, config: Any) -> str | None:
        """See `Family.refusal`."""
        if getattr(config, "attention_bias", False):
            return (
                "attention_bias is true in this qwen3 config, which puts a bias on o_proj too, and "
                "glm4_moe has none there. Choose a model without attention biases."
            )
        return super().refusal(config)

    def attention(self, config: Any) -> AttentionTraits:
        """See `Family.attention`."""
        return AttentionTraits(
            qkv_bias=False,
            qk_norm=True,
            head_dim=head_dim(config),
            sliding_window=sliding_window(config),
        )
