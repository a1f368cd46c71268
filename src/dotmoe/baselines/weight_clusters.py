"""Neurons whose weights point the same way: MoEfication's parameter clustering, and LLaMA-MoE v1's
independent clustering.

From the originals: rows of a projection of unit length, k-means with clusters of equal size, no
data. MoEfication's similarity router: cosine of the token with the mean of an expert's unit rows;
the token's own length changes no order, so it is a linear map and can be exported as it is.
Different here: rows of the gate projection stand for MoEfication's only input projection (v1 takes
gate or up; `clustered_rows` has both), starts are seeded and the best of a few is kept, and v1's
random gate is left out because MoEfication's is better.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dotmoe.baselines.contract import Layer, LayerSplit, SplitInputs
from dotmoe.baselines.kmeans import balanced_kmeans, means, optimal_assignment, squared_distance


def weight_clusters(inputs: SplitInputs) -> Iterator[LayerSplit]:
    """Split every layer by balanced clusters of its weights."""
    config, num_experts = inputs.config, inputs.granularity.num_experts
    for layer in inputs.layers():
        rows_NF = unit_rows(layer, config.clustered_rows)
        expert_N = balanced_kmeans(
            rows_NF,
            num_experts,
            rounds=config.cluster_rounds,
            starts=config.cluster_starts,
            generator=layer.generator,
        )
        centre_EF = means(rows_NF, expert_N, num_experts)
        expert_N = optimal_assignment(squared_distance(rows_NF, centre_EF))
        yield LayerSplit(
            layer=layer,
            expert_of_neuron_N=expert_N,
            router_ED=similarity_router(layer, expert_N, num_experts),
        )


def unit_rows(layer: Layer, which: str) -> Float[Tensor, "N F"]:
    """Rows of gate, up or both beside each other, each of unit length, float32."""
    rows = {
        "gate": F.normalize(layer.ffn.gate.weight.float(), dim=1),
        "up": F.normalize(layer.ffn.up.weight.float(), dim=1),
    }
    return torch.cat([rows[name] for name in (rows if which == "both" else (which,))], dim=1)


def similarity_router(
    layer: Layer, expert_N: Int[Tensor, " N"], num_experts: int
) -> Float[Tensor, "E D"]:
    """Direction of the mean unit gate row of each expert (MoEfication's similarity selection)."""
    return F.normalize(means(unit_rows(layer, "gate"), expert_N, num_experts), dim=1)
