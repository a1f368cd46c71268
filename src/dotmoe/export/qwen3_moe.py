"""Export to Qwen3-MoE, the native twin of Qwen3.

Softmax over all logits, renormalised over the chosen: llama.cpp renormalises here, whatever the
config says. Each weight is 1/k within `l 2^-p / k`; k is folded into the down projections.
"""

from typing import Any

from dotmoe.export.architecture import Conversion
from dotmoe.export.gating import Gating
from dotmoe.export.holds import Holds
from dotmoe.export.stock_moe import StockMoe
from dotmoe.granularity import Granularity


class Qwen3Moe(StockMoe):
    """`Qwen3MoeForCausalLM`; in every runtime."""

    name = "qwen3_moe"
    class_name = "Qwen3MoeForCausalLM"
    servers = ("Transformers", "vLLM", "SGLang", "llama.cpp's converter")
    holds = Holds(biases=("none", "qkvo"), qk_norm=("head",), dense_layers=True)
    block_has_shared = True
    moe_keys = (
        "moe_intermediate_size",
        "norm_topk_prob",
        "decoder_sparse_step",
        "mlp_only_layers",
        "use_sliding_window",
        "attention_bias",
    )

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
        layout, dense = conversion.layout, conversion.dense
        return {
            "moe_intermediate_size": layout.expert_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(range(layout.first_dense_layers)),
            "use_sliding_window": False,
            "attention_bias": dense.family.traits(dense.config).qkv_bias,
        }
