"""Export to Qwen2-MoE, the native twin of Qwen2 and Qwen2.5.

The block weights the chosen experts by a softmax over all logits, not renormalised: llama.cpp never
renormalises here, whatever the config says. With router rows scaled by 2^-p each weight is 1/E
within `l 2^-p / E`; E is folded into the down projections, and k stays free. The shared expert is
weighted by a sigmoid, which its gate of 2^-20 holds at one half. A gate of zero would do in
Transformers, but llama.cpp divides by it.
"""

from collections.abc import Iterator
from typing import Any

from dotmoe.export import tensor_specs as specs
from dotmoe.export.architecture import Conversion, TensorSpec
from dotmoe.export.gating import Gating
from dotmoe.export.holds import Holds
from dotmoe.export.stock_moe import StockMoe
from dotmoe.granularity import Granularity
from dotmoe.layout import ExpertLayout

SHARED_GATE = 2.0**-20
"""Entry of the shared expert's gate: its sigmoid is 1/2."""
EMPTY_SHARED_SIZE = 128
"""Neurons of a shared expert of zeros; servers fail on one without neurons."""


class Qwen2Moe(StockMoe):
    """`Qwen2MoeForCausalLM`; in every runtime."""

    name = "qwen2_moe"
    class_name = "Qwen2MoeForCausalLM"
    servers = ("Transformers", "vLLM", "SGLang", "llama.cpp's converter")
    exactness = "expert weights rounded once, down projections times E; gates 1 but for about 2^-10"
    holds = Holds(biases=("qkv",), any_head_dim=False, shared_expert=True, dense_layers=True)
    active_experts_editable = True
    block_has_shared = True
    block_error = 8e-3
    moe_keys = (
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "norm_topk_prob",
        "decoder_sparse_step",
        "mlp_only_layers",
        "use_sliding_window",
        "qkv_bias",
    )

    def gating(self, granularity: Granularity) -> Gating:
        """See `OutputArchitecture.gating`."""
        return Gating(
            score="softmax",
            renormalised=False,
            constant=float(granularity.num_experts),
            cast_to_model_dtype=True,
            logits_in_model_dtype=True,
        )

    def own_notes(self, layout: ExpertLayout) -> list[str]:
        """See `StockMoe.own_notes`."""
        notes = []
        if not layout.shared_size:
            notes.append(
                "Each layer stores a shared expert of zeros, which contributes nothing: llama.cpp "
                "cannot load the architecture without one."
            )
        if layout.first_dense_layers:
            notes.append("llama.cpp cannot load this architecture with dense layers.")
        return notes

    def moe_config(self, conversion: Conversion) -> dict[str, Any]:
        """See `StockMoe.moe_config`."""
        layout = conversion.layout
        return {
            "moe_intermediate_size": layout.expert_size,
            "shared_expert_intermediate_size": layout.shared_size or EMPTY_SHARED_SIZE,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(range(layout.first_dense_layers)),
            "use_sliding_window": False,
            "qkv_bias": True,
        }

    def moe_tensors(self, conversion: Conversion, layer: int) -> Iterator[TensorSpec]:
        """See `StockMoe.moe_tensors`."""
        prefix = f"model.layers.{layer}.mlp"
        yield from super().moe_tensors(conversion, layer)
        width = conversion.dense.widths.model
        gate = f"{prefix}.shared_expert_gate.weight"
        yield specs.constant(gate, (1, width), conversion.dtype, SHARED_GATE)
        for projection in specs.PROJECTIONS:
            yield specs.neurons(
                conversion,
                layer,
                projection,
                conversion.layout.shared_neurons(layer),
                f"{prefix}.shared_expert.{projection}_proj.weight",
                factor=2.0 if projection == "down" else 1.0,
                size=conversion.layout.shared_size or EMPTY_SHARED_SIZE,
            )
