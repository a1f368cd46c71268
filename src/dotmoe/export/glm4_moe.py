"""Export to GLM4-MoE: untouched expert slices, and a k that can be edited after export.

The block computes `2.0 * sum over the top k of sigmoid(l_e) * expert_e(x) + shared(x)`. With router
rows scaled by 2^-p the sigmoids are 1/2 within `l 2^-p / 4`, so each gate is 1 within
`l 2^-p / 2`, for every k. The shared expert, which the architecture cannot do without, holds the
neurons that are always on, and zeros where there are none.
"""

from collections.abc import Iterator
from typing import Any

import torch

from dotmoe.export import tensor_specs as specs
from dotmoe.export.architecture import Conversion, TensorSpec
from dotmoe.export.gating import Gating
from dotmoe.export.holds import Holds
from dotmoe.export.stock_moe import EXACT_BLOCK_RATIO, StockMoe
from dotmoe.granularity import Granularity
from dotmoe.layout import ExpertLayout


class Glm4Moe(StockMoe):
    """`Glm4MoeForCausalLM`; in Transformers since 4.54, vLLM and SGLang."""

    name = "glm4_moe"
    class_name = "Glm4MoeForCausalLM"
    servers = ("Transformers", "vLLM", "SGLang")
    exactness = "expert weights are the dense ones bit for bit; gates 1 but for about 2^-11"
    holds = Holds(
        biases=("none", "qkv"), qk_norm=("none", "head"), shared_expert=True, dense_layers=True
    )
    experts_key = "n_routed_experts"
    active_experts_editable = True
    block_has_shared = True
    block_ratio = EXACT_BLOCK_RATIO
    moe_keys = (
        "moe_intermediate_size",
        "n_shared_experts",
        "n_group",
        "topk_group",
        "norm_topk_prob",
        "routed_scaling_factor",
        "first_k_dense_replace",
        "num_nextn_predict_layers",
        "attention_bias",
        "use_qk_norm",
        "partial_rotary_factor",
    )

    def gating(self, granularity: Granularity) -> Gating:
        """See `OutputArchitecture.gating`."""
        return Gating(score="sigmoid", renormalised=False, constant=2.0)

    def down_factor(self, granularity: Granularity) -> float:
        """The constant is a field of the config: weights stay the dense ones."""
        return 1.0

    def own_notes(self, layout: ExpertLayout) -> list[str]:
        """See `StockMoe.own_notes`."""
        if layout.shared_size:
            return []
        return [
            "Each layer stores one shared expert of zeros: the architecture demands it, it "
            "contributes nothing."
        ]

    def moe_config(self, conversion: Conversion) -> dict[str, Any]:
        """See `StockMoe.moe_config`."""
        layout = conversion.layout
        traits = conversion.dense.family.traits(conversion.dense.config)
        return {
            "partial_rotary_factor": 1.0,
            "attention_bias": traits.qkv_bias,
            "use_qk_norm": traits.qk_norm == "head",
            "moe_intermediate_size": layout.expert_size,
            "n_shared_experts": num_shared_experts(layout),
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": self.gating(conversion.granularity).constant,
            "first_k_dense_replace": layout.first_dense_layers,
            "num_nextn_predict_layers": 0,
        }

    def config(self, conversion: Conversion) -> dict[str, Any]:
        """See `OutputArchitecture.config`."""
        config = super().config(conversion)
        # Read from rope_parameters by 5.x and from the top level by 4.5x; the default is 0.5.
        config["rope_parameters"]["partial_rotary_factor"] = 1.0
        return config

    def moe_tensors(self, conversion: Conversion, layer: int) -> Iterator[TensorSpec]:
        """See `StockMoe.moe_tensors`."""
        prefix = f"model.layers.{layer}.mlp"
        yield from super().moe_tensors(conversion, layer)
        num_experts = conversion.layout.num_experts
        yield specs.zeros(f"{prefix}.gate.e_score_correction_bias", (num_experts,), torch.float32)
        for projection in specs.PROJECTIONS:
            yield specs.neurons(
                conversion,
                layer,
                projection,
                conversion.layout.shared_neurons(layer),
                f"{prefix}.shared_experts.{projection}_proj.weight",
                size=num_shared_experts(conversion.layout) * conversion.layout.expert_size,
            )


def num_shared_experts(layout: ExpertLayout) -> int:
    """Shared experts of the routed experts' size that hold the neurons always on; at least 1."""
    return max(1, -(-layout.shared_size // layout.expert_size))
