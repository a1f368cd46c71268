"""GGUF of llama.cpp's architecture `llama`, in its mixture-of-experts form.

It weights the chosen experts by the renormalised softmax of their logits, 1/k for a scaled router,
and multiplies the output of each by its entry of `ffn_down_exps.scale`, which is k: the weights of
the experts stay the dense ones for every k.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from dotmoe.artifacts import DenseModel
from dotmoe.export.format import Conversion
from dotmoe.gguf_export.decoder import DecoderForm, Metadata, decoder_refusal
from dotmoe.gguf_export.experts import expert_tensors, experts_refusal
from dotmoe.gguf_export.tensor_plan import GgufTensor, whole
from dotmoe.granularity import Granularity
from dotmoe.layout import ExpertLayout

FORM = DecoderForm(arch="llama", rotates_pairs=True, qk_norm=("none",), output_bias=True)


class GgufLlama:
    """See `GgufArchitecture`."""

    name = "gguf_llama"
    form = FORM
    num_moe_tensors = 5
    exponent: int | None = None

    def refusal(self, dense: DenseModel, granularity: Granularity) -> str | None:
        """See `GgufArchitecture.refusal`."""
        parts = {
            "a shared expert": granularity.shared_size,
            "leading dense layers": granularity.first_dense_layers,
        }
        for part, size in parts.items():
            if size:
                return (
                    f"The layout has {part}, which llama.cpp's architecture llama has no place "
                    "for. Choose --format gguf_glm4moe."
                )
        return experts_refusal(granularity) or decoder_refusal(dense, FORM, self.name)

    def notes(self, layout: ExpertLayout) -> list[str]:
        """See `GgufArchitecture.notes`."""
        return [
            "llama.cpp ranks the experts after a softmax in float32: the weights of the experts "
            "differ from 1, and near-ties may fall otherwise, as the router figures of the record "
            "say. gguf_glm4moe has neither.",
            "A llama.cpp that does not know ffn_down_exps.scale refuses the file: it was run with "
            "that of llama-cpp-python 0.3.36.",
        ]

    def metadata(self, conversion: Conversion) -> Metadata:
        """See `GgufArchitecture.metadata`."""
        layout = conversion.layout
        keys, _ = self.active_experts_values(layout)
        return {
            "feed_forward_length": layout.expert_size,
            "expert_count": layout.num_experts,
            **keys,
        }

    def moe_tensors(self, conversion: Conversion, layer: int) -> Iterator[GgufTensor]:
        """See `GgufArchitecture.moe_tensors`."""
        layout = conversion.layout
        router_ED = layout.router_LED[layer].cpu() * 2.0 ** -conversion.exponents[layer]
        yield whole(f"blk.{layer}.ffn_gate_inp.weight", router_ED)
        yield from expert_tensors(conversion, layer)
        scale_E = torch.full((layout.num_experts,), float(layout.active_experts))
        yield whole(f"blk.{layer}.ffn_down_exps.scale", scale_E)

    def active_experts_values(self, layout: ExpertLayout) -> tuple[Metadata, dict[str, float]]:
        """See `GgufArchitecture.active_experts_values`."""
        active = layout.active_experts
        scales = {f"blk.{n}.ffn_down_exps.scale": float(active) for n in layout.moe_layers}
        return {"expert_used_count": active}, scales

    def weights(self, scaled_TE: Tensor, active_experts: int) -> tuple[Tensor, Tensor]:
        """See `GgufArchitecture.weights`."""
        probabilities_TE = torch.softmax(scaled_TE.float(), dim=1)
        chosen_TK = probabilities_TE.topk(active_experts, dim=1).indices
        weights_TK = probabilities_TE.gather(1, chosen_TK)
        return chosen_TK, weights_TK / weights_TK.sum(dim=1, keepdim=True) * active_experts
