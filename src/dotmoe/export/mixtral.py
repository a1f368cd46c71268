"""Export to Mixtral, the native twin of LLaMA, Mistral and Phi-3.

The block weights the chosen experts by a softmax over their logits. With router rows scaled by
2^-p each weight is 1/k within `l 2^-p / k`; k is folded into the down projections.
"""

from typing import Any

from dotmoe.export.architecture import Conversion
from dotmoe.export.gating import Gating
from dotmoe.export.holds import Holds
from dotmoe.export.stock_moe import StockMoe
from dotmoe.granularity import Granularity


class Mixtral(StockMoe):
    """`MixtralForCausalLM`; in every runtime."""

    name = "mixtral"
    class_name = "MixtralForCausalLM"
    servers = ("Transformers", "vLLM", "SGLang", "llama.cpp's converter")
    holds = Holds(sliding_window=True)
    experts_key = "num_local_experts"
    router_name = "block_sparse_moe.gate.weight"
    block_has_shared = True
    moe_keys = ("intermediate_size", "sliding_window", "router_jitter_noise")

    def gating(self, granularity: Granularity) -> Gating:
        """See `OutputArchitecture.gating`."""
        return Gating(
            score="softmax",
            renormalised=True,
            constant=float(granularity.active_experts),
            logits_in_model_dtype=True,
        )

    def expert_tensor(self, expert: int, projection: str) -> str:
        """See `StockMoe.expert_tensor`."""
        part = {"gate": "w1", "up": "w3", "down": "w2"}[projection]
        return f"block_sparse_moe.experts.{expert}.{part}.weight"

    def moe_config(self, conversion: Conversion) -> dict[str, Any]:
        """See `StockMoe.moe_config`."""
        dense = conversion.dense
        return {
            "intermediate_size": conversion.layout.expert_size,
            "sliding_window": dense.family.traits(dense.config).sliding_window,
            "router_jitter_noise": 0.0,
        }
