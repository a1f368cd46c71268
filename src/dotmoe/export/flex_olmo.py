"""Export to FlexOlmo, the native twin of OLMo 2.

Softmax over all logits, renormalised over the chosen. The RMSNorm behind each block would cancel a
common factor of its output but for its epsilon, so k is folded into the down projections as for the
others.
"""

from typing import Any

from dotmoe.export.architecture import Conversion
from dotmoe.export.gating import Gating
from dotmoe.export.holds import Holds
from dotmoe.export.stock_moe import StockMoe
from dotmoe.granularity import Granularity


class FlexOlmo(StockMoe):
    """`FlexOlmoForCausalLM`; in Transformers and vLLM."""

    name = "flex_olmo"
    class_name = "FlexOlmoForCausalLM"
    servers = ("Transformers", "vLLM", "SGLang")
    holds = Holds(biases=("none", "qkvo"), qk_norm=("full",), norms_after=True, any_head_dim=False)
    block_has_shared = True
    moe_keys = ("intermediate_size", "norm_topk_prob", "attention_bias")

    def gating(self, granularity: Granularity) -> Gating:
        """See `OutputArchitecture.gating`."""
        return Gating(
            score="softmax",
            renormalised=True,
            constant=float(granularity.active_experts),
            cast_to_model_dtype=True,
            logits_in_model_dtype=True,
        )

    def moe_config(self, conversion: Conversion) -> dict[str, Any]:
        """See `StockMoe.moe_config`."""
        dense = conversion.dense
        return {
            "intermediate_size": conversion.layout.expert_size,
            "norm_topk_prob": True,
            "attention_bias": dense.family.traits(dense.config).qkv_bias,
        }
