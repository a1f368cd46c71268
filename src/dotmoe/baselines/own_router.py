"""A layout under the router its method really has, where that is no linear map.

For measuring only: no stock architecture holds it, so the exported checkpoint has the closest
linear router instead, and the distance between the two perplexities is what that costs.
"""

from contextlib import AbstractContextManager

import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor, nn

from dotmoe.baselines.cmoe import representative_scores
from dotmoe.layout import ExpertLayout
from dotmoe.models.dense import DenseModel
from dotmoe.models.traits import GatedFFN
from dotmoe.moe.masked import masked_activation
from dotmoe.moe.router import top_k_mask
from dotmoe.moe.units import replaced


class RepresentativeFFN(nn.Module):
    """A dense FFN of which the shared neurons and the k experts run whose representatives score
    highest, with weight 1.
    """

    def __init__(
        self, projections: GatedFFN, expert_of_neuron_N: Tensor, representative_E: Tensor, k: int
    ) -> None:
        super().__init__()
        self.expert_of_neuron_N = expert_of_neuron_N % (len(representative_E) + 1)
        self.representative_E = representative_E
        self.active_experts = k
        self._projections = (projections,)  # in a tuple: not registered a second time

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D]."""
        (ffn,) = self._projections
        x_TD = x.reshape(-1, x.shape[-1])
        score_TE = representative_scores(ffn, x_TD, self.representative_E)
        mask = F.pad(top_k_mask(score_TE, self.active_experts), (0, 1), value=1.0)
        hidden = masked_activation(ffn.gate(x_TD), ffn.up(x_TD), mask, self.expert_of_neuron_N)
        output: Tensor = ffn.down(hidden).view(x.shape)
        return output


def routed_by_representatives(
    dense: DenseModel, layout: ExpertLayout, representative_LE: Int[Tensor, "L E"]
) -> AbstractContextManager[None]:
    """Inside, `dense.model` is the MoE of the layout's experts under its method's own router."""
    layers = dense.family.layers(dense.model)
    return replaced(
        dense,
        layout.moe_layers,
        lambda index, ffn: RepresentativeFFN(
            dense.family.ffn(layers[index]),
            layout.expert_of_neuron_LN[index].to(dense.device),
            representative_LE[index].to(dense.device),
            layout.active_experts,
        ),
    )
