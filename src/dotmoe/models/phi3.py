"""Phi-3 and Phi-4: LLaMA with fused projections, and an optional sliding window on every layer.

The model in memory keeps the fused weights; `ffn` and `stored` name the rows of the parts.
"""

from typing import Any, cast

from torch import nn

from dotmoe.models.llama import Llama, head_dim
from dotmoe.models.traits import DecoderTraits, GatedFFN, Rows, TensorPart


class Phi3(Llama):
    """Phi-3-mini and -medium with the short context, and Phi-4."""

    model_type = "phi3"

    def refusal(self, config: Any) -> str | None:
        """See `Family.refusal`."""
        rope = config.rope_parameters
        if rope["rope_type"] == "longrope":  # Transformers' name for su and, in this family, yarn
            return (
                "rope_type is 'longrope' in this phi3 config, as in Phi-3 with 128k of context and "
                "Phi-4-mini: its rotary frequencies change with the length of the text, and "
                "runtimes choose them by different rules. Choose the model with the short context."
            )
        factor = rope.get("partial_rotary_factor", 1.0)
        if factor != 1:
            return (
                f"partial_rotary_factor is {factor} in this phi3 config, but whole heads must be "
                "rotated (factor 1) to be exported exactly. Choose a model without it."
            )
        return super().refusal(config)

    def traits(self, config: Any) -> DecoderTraits:
        """See `Family.traits`."""
        return DecoderTraits(head_dim=head_dim(config), sliding_window=config.sliding_window)

    def ffn(self, layer: nn.Module) -> GatedFFN:
        """See `Family.ffn`."""
        fused = cast(nn.Linear, layer.get_submodule("mlp.gate_up_proj"))
        down = cast(nn.Linear, layer.get_submodule("mlp.down_proj"))
        width = down.weight.shape[1]
        return GatedFFN(Rows(fused, 0, width), Rows(fused, width, 2 * width), down)

    def stored(self, config: Any, name: str) -> TensorPart:
        """See `Family.stored`."""
        query = config.num_attention_heads * head_dim(config)
        key = query + config.num_key_value_heads * head_dim(config)
        value = key + config.num_key_value_heads * head_dim(config)
        width = config.intermediate_size
        rows_of = {
            "q_proj": ("qkv_proj", (0, query)),
            "k_proj": ("qkv_proj", (query, key)),
            "v_proj": ("qkv_proj", (key, value)),
            "gate_proj": ("gate_up_proj", (0, width)),
            "up_proj": ("gate_up_proj", (width, 2 * width)),
        }
        module, _, kind = name.rpartition(".")
        block, _, projection = module.rpartition(".")
        if projection not in rows_of:
            return TensorPart(name)
        fused, rows = rows_of[projection]
        return TensorPart(f"{block}.{fused}.{kind}", rows)
