"""Neurons by when they are strongest: CMoE's activation markers, shared expert and analytic router.

From the original: activations of unit inputs and unit weight rows; on every token the K_a neurons
of largest size are marked. Those marked most often make the shared expert. The markers of the most
marked of the rest are the first centres; neurons go to centres by exact balanced assignment on L1
distances; centres become means. An expert's representative is the neuron nearest its centre.
Router: the size of the representative's true activation; the top experts run, with weight 1 at the
start.
Different here: all layers are calibrated on the dense model's inputs, as every method of this
package is (the original feeds each layer what the converted layers before it put out), and on all
calibration tokens (the original reads its first batch only). No stock architecture holds that
router, which is not linear: the layout's is a ridge regression to its scores, and `own_router`
measures the true one. The bias that balances loads starts at 0 and moves in fine-tuning only, so it
is left out.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dotmoe.baselines.contract import Layer, LayerSplit, SplitInputs
from dotmoe.baselines.kmeans import means, optimal_assignment
from dotmoe.calibrate import ridge_router
from dotmoe.layout import ALWAYS_ON
from dotmoe.models.traits import GatedFFN


def cmoe(inputs: SplitInputs) -> Iterator[LayerSplit]:
    """Split every layer into a shared expert and clusters of markers."""
    split, config = inputs.granularity, inputs.config
    for layer in inputs.layers():
        marks_TN = markers(layer, min(config.marked_neurons, split.ffn_width))
        order_N = marks_TN.sum(dim=0).argsort(descending=True, stable=True)
        routed = order_N[split.shared_size :]
        cluster, nearest = marker_clusters(
            marks_TN[:, routed], split.num_experts, rounds=config.marker_rounds
        )
        expert_N = torch.full((split.ffn_width,), ALWAYS_ON, device=routed.device)
        expert_N[routed] = cluster
        representative_E = routed[nearest]
        score_TE = representative_scores(layer.ffn, layer.x_TD, representative_E)
        yield LayerSplit(
            layer=layer,
            expert_of_neuron_N=expert_N,
            router_ED=ridge_router(layer.x_TD, score_TE.square(), inputs.calibrate.ridge),
            representative_E=representative_E,
        )


@torch.no_grad()
def markers(layer: Layer, marked_neurons: int) -> Bool[Tensor, "T N"]:
    """Whether a neuron's normalised activation is among the `marked_neurons` largest of a token."""
    x_TD = F.normalize(layer.x_TD, dim=1)
    gate_TN = x_TD @ F.normalize(layer.ffn.gate.weight.float(), dim=1).T
    up_TN = x_TD @ F.normalize(layer.ffn.up.weight.float(), dim=1).T
    strongest = (F.silu(gate_TN) * up_TN).abs().topk(marked_neurons, dim=1).indices
    return torch.zeros_like(gate_TN, dtype=torch.bool).scatter_(1, strongest, True)


def marker_clusters(
    marks_TN: Bool[Tensor, "T N"], num_experts: int, *, rounds: int
) -> tuple[Int[Tensor, " N"], Int[Tensor, " E"]]:
    """Cluster of each neuron, all of one size, and the neuron nearest to each cluster's centre.

    Args:
        marks_TN: Markers of the routed neurons, most marked first: the first E are first centres.
        num_experts: E.
        rounds: Times that neurons are assigned and centres formed anew, at least 1.
    """
    marks_NT = marks_TN.T.float()
    centre_ET = marks_NT[:num_experts]
    for _ in range(rounds):
        expert_N = optimal_assignment(l1_distance(marks_NT, centre_ET))
        centre_ET = means(marks_NT, expert_N, num_experts)
    distance_NE = l1_distance(marks_NT, centre_ET)
    others = torch.arange(num_experts, device=expert_N.device) != expert_N[:, None]
    return expert_N, distance_NE.masked_fill(others, torch.inf).argmin(dim=0)


def l1_distance(
    marks_NT: Float[Tensor, "N T"], centre_ET: Float[Tensor, "E T"]
) -> Float[Tensor, "N E"]:
    """Sum of |mark - centre| over tokens, for marks of 0 or 1 and centres between."""
    return marks_NT @ (1 - 2 * centre_ET).T + centre_ET.sum(dim=1)


@torch.no_grad()
def representative_scores(
    ffn: GatedFFN, x_TD: Tensor, representative_E: Int[Tensor, " E"]
) -> Float[Tensor, "T E"]:
    """Scores of CMoE's router: |SiLU(w_gate . x) * (w_up . x)| of the representatives, float32."""
    gate_TE = x_TD.float() @ ffn.gate.weight[representative_E].float().T
    up_TE = x_TD.float() @ ffn.up.weight[representative_E].float().T
    return (F.silu(gate_TE) * up_TE).abs()
