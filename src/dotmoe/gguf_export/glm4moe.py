"""GGUF of llama.cpp's architecture `glm4moe`, with gates that are exactly binary.

Gating function 3 chooses experts by their logits and takes the softmax over the chosen alone. With
router rows times 2^-40 all k logits are equal to float32, so each weight is 1/k, and
`expert_weights_scale` makes that 1; ranking is untouched, and nothing is traded for it.
"""

from collections.abc import Iterator
from math import ceil

import torch
from torch import Tensor

from dotmoe.artifacts import DenseModel
from dotmoe.export.format import Conversion
from dotmoe.export.tensors import PROJECTIONS
from dotmoe.gguf_export.decoder import DecoderForm, Metadata, decoder_refusal
from dotmoe.gguf_export.experts import expert_tensors, experts_refusal
from dotmoe.gguf_export.tensor_plan import GgufTensor, down, gate_or_up, whole
from dotmoe.granularity import Granularity
from dotmoe.layout import ExpertLayout

SOFTMAX_OF_CHOSEN = 3
"""`expert_gating_func` of the softmax over the chosen logits; the gguf package has no name for it.
"""


class GgufGlm4Moe:
    """See `GgufArchitecture`."""

    name = "gguf_glm4moe"
    form = DecoderForm(
        arch="glm4moe",
        rotates_pairs=False,
        qk_norm=("none", "head"),
        output_bias=False,
        ffn_norm="post_attention_norm",
    )
    num_moe_tensors = 8
    exponent: int | None = 40

    def refusal(self, dense: DenseModel, granularity: Granularity) -> str | None:
        """See `GgufArchitecture.refusal`."""
        return experts_refusal(granularity) or decoder_refusal(dense, self.form, self.name)

    def notes(self, layout: ExpertLayout) -> list[str]:
        """See `GgufArchitecture.notes`."""
        if layout.shared_size:
            return []
        return [
            "Each split layer stores one shared expert of zeros: the architecture demands it, it "
            "contributes nothing."
        ]

    def metadata(self, conversion: Conversion) -> Metadata:
        """See `GgufArchitecture.metadata`."""
        layout = conversion.layout
        keys, _ = self.active_experts_values(layout)
        return {
            "feed_forward_length": layout.num_neurons,
            "expert_feed_forward_length": layout.expert_size,
            "expert_count": layout.num_experts,
            "expert_shared_count": _num_shared(layout),
            "leading_dense_block_count": layout.first_dense_layers,
            "expert_gating_func": SOFTMAX_OF_CHOSEN,
            "expert_weights_norm": False,
            **keys,
        }

    def moe_tensors(self, conversion: Conversion, layer: int) -> Iterator[GgufTensor]:
        """See `GgufArchitecture.moe_tensors`."""
        layout = conversion.layout
        router_ED = layout.router_LED[layer].cpu() * 2.0 ** -conversion.exponents[layer]
        yield whole(f"blk.{layer}.ffn_gate_inp.weight", router_ED)
        yield whole(f"blk.{layer}.exp_probs_b.bias", torch.zeros(layout.num_experts))
        yield from expert_tensors(conversion, layer)
        yield from _shared_expert(conversion, layer)

    def active_experts_values(self, layout: ExpertLayout) -> tuple[Metadata, dict[str, float]]:
        """See `GgufArchitecture.active_experts_values`."""
        active = layout.active_experts
        return {"expert_used_count": active, "expert_weights_scale": float(active)}, {}

    def weights(self, scaled_TE: Tensor, active_experts: int) -> tuple[Tensor, Tensor]:
        """See `GgufArchitecture.weights`."""
        chosen_TK = scaled_TE.topk(active_experts, dim=1).indices
        weights_TK = torch.softmax(scaled_TE.float().gather(1, chosen_TK), dim=1)
        return chosen_TK, weights_TK * active_experts


def _num_shared(layout: ExpertLayout) -> int:
    """Shared experts, each as wide as a routed one, that hold the neurons that are always on."""
    return max(1, ceil(layout.shared_size / layout.expert_size))


def _shared_expert(conversion: Conversion, layer: int) -> Iterator[GgufTensor]:
    layout, family = conversion.layout, conversion.dense.family
    neurons = layout.shared_neurons(layer).cpu()
    size = _num_shared(layout) * layout.expert_size
    for projection in PROJECTIONS:
        make = down if projection == "down" else gate_or_up
        yield make(
            conversion.tensors,
            family.ffn_tensor(layer, projection),
            f"blk.{layer}.ffn_{projection}_shexp.weight",
            neurons,
            size,
        )
