"""CMoE: clusters of activation markers, a shared expert and an analytic router.

From the original: with inputs and weight rows scaled to unit length, the K_a neurons of largest
absolute activation are marked for every token. The neurons marked most often make the shared
expert. Markers of the most marked of the rest are the first centres; neurons go to centres by exact
balanced assignment on L1 distances; centres become means. An expert's representative is the neuron
nearest to its centre. The experts whose representatives' true activations are largest run. Earlier
layers are converted when a layer is calibrated.
Different here: all calibration tokens are read, not only the first batch; representatives use
weight rows as they are, as in the paper's equation, not scaled to unit length as in the published
code. No stock architecture holds this nonlinear router: the layout's is a ridge regression to its
scores. The load-balancing bias changes only in finetuning, so it is left out.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from dotmoe.method.calibrate import RidgeRouter
from dotmoe.method.layout import ALWAYS_ON
from dotmoe.method.router import top_k_mask
from dotmoe.rivals.baselines.contract import (
    Layer,
    LayerSplit,
    SplitInputs,
    cluster_means,
    gated,
    optimal_assignment,
)

MARKED = 10
"""Number of neurons that are marked as active for a token (K_a)."""


@torch.no_grad()
def cmoe(inputs: SplitInputs) -> Iterator[LayerSplit]:
    """Split every layer into a shared expert and experts that are clusters of markers."""
    split, k = inputs.granularity, inputs.granularity.active_experts

    # Called after the layer was split: `expert_N` and `own` are then that layer's.
    def converted(index: int) -> AbstractContextManager[None]:
        experts = {index: expert_N} if index >= split.first_dense_layers else {}

        def gate(_: int, x_TD: Tensor, hidden_TN: Tensor) -> Tensor:
            return by_representatives(own, x_TD, hidden_TN, k)

        return gated(inputs.dense, experts, gate)

    for layer, dense in zip(inputs.layers(converted), inputs.layers(), strict=True):
        marks_TN = _markers(layer)
        order_N = marks_TN.sum(dim=0).argsort(descending=True, stable=True)
        routed = order_N[split.shared_size :]
        # The most marked come first: the first E are the first centres.
        marks_NT = marks_TN.T[routed]
        cluster_N = optimal_assignment(_l1_distance(marks_NT, marks_NT[: split.num_experts]))
        centre_ET = cluster_means(marks_NT, cluster_N, split.num_experts)
        others = torch.arange(split.num_experts, device=routed.device) != cluster_N[:, None]
        distance_NE = _l1_distance(marks_NT, centre_ET).masked_fill(others, torch.inf)
        representative_E = routed[distance_NE.argmin(dim=0)]
        expert_N = torch.full((split.units,), ALWAYS_ON, device=routed.device)
        expert_N[routed] = cluster_N
        score_TE = F.normalize(layer.hidden()[:, representative_E].abs(), p=1, dim=1)
        router_ED = RidgeRouter(layer.x_TD, inputs.calibrate.ridge)(score_TE)
        own = {"representative": representative_E}
        yield LayerSplit(dense, expert_N, router_ED, own)


def _markers(layer: Layer) -> Float[Tensor, "T N"]:
    """1 where a normalised activation is among the K_a largest of a token, else 0."""
    x_TD = F.normalize(layer.x_TD, dim=1)
    gate_ND, up_ND = (F.normalize(part.weight.float(), dim=1) for part in layer.ffn[:2])
    hidden_TN = layer.ffn.activation.apply(x_TD @ gate_ND.T) * (x_TD @ up_ND.T)
    return top_k_mask(hidden_TN.abs(), min(MARKED, len(gate_ND)))


def _l1_distance(marks_NT: Tensor, centre_ET: Tensor) -> Float[Tensor, "N E"]:
    """Sum of |mark - centre| over tokens, for marks of 0 or 1 and centres in [0, 1]."""
    return marks_NT @ (1 - 2 * centre_ET).T + centre_ET.sum(dim=1)


def by_representatives(
    own: Mapping[str, Tensor], x_TD: Tensor, hidden_TN: Tensor, k: int
) -> Tensor:
    """CMoE's own router: the k experts whose representatives have the largest |H|."""
    return top_k_mask(hidden_TN[:, own["representative"]].abs().float(), k)
