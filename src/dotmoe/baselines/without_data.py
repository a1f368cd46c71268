"""Splits that look at no text: at random, as stored, and by the directions of the weights.

`random_split` is LLaMA-MoE v1's independent random split: every neuron gets one label, every label
equally often, in random order; continued pretraining has to do the rest. Different here: the order
has a seed (the original's has none), each layer its own; the random router is one linear map, not
the two-layer gate with noise, which no stock architecture holds.

`contiguous_split` takes neurons in the order they are stored, s after s: what LLaMA-MoE v2's
instructions do by default. Different here: random router entries are normal instead of
Kaiming-uniform, which changes nothing in distribution, and our plain sum needs no scale factor.

`weight_clusters` is MoEfication's parameter clustering and LLaMA-MoE v1's independent clustering:
rows of a projection of unit length, k-means with clusters of equal size. MoEfication's similarity
router: cosine of the token with the mean of an expert's unit rows; the token's own length changes
no order, so it is a linear map and can be exported as it is. Different here: rows of the gate
projection stand for MoEfication's only input projection (v1 takes gate or up; `clustered_rows` has
both), starts are seeded and the best of a few is kept, and v1's random gate is left out because
MoEfication's is better.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dotmoe.baselines.contract import (
    Layer,
    LayerSplit,
    SplitInputs,
    balanced_kmeans,
    means,
    optimal_assignment,
    squared_distance,
)
from dotmoe.baselines.predictor import predictor


def random_split(inputs: SplitInputs) -> Iterator[LayerSplit]:
    """Deal every layer's neurons at random."""
    return _dealt(inputs, is_random=True)


def contiguous_split(inputs: SplitInputs) -> Iterator[LayerSplit]:
    """Split every layer into runs of neighbouring neurons."""
    return _dealt(inputs, is_random=False)


def _dealt(inputs: SplitInputs, *, is_random: bool) -> Iterator[LayerSplit]:
    split, width = inputs.granularity, inputs.granularity.units
    for layer in inputs.layers():
        generator = layer.generator
        order_N = torch.randperm(width, generator=generator) if is_random else torch.arange(width)
        # Normal entries; their common scale changes no routing.
        router_ED = torch.randn(split.num_experts, layer.x_TD.shape[1], generator=generator)
        yield LayerSplit(
            layer=layer,
            expert_of_neuron_N=order_N // split.expert_size,
            router_ED=router_ED.to(layer.x_TD.device),
        )


def weight_clusters(inputs: SplitInputs) -> Iterator[LayerSplit]:
    """Split every layer by balanced clusters of its weights."""
    num_experts = inputs.granularity.num_experts
    for layer in inputs.layers():
        rows = {
            "gate": F.normalize(layer.ffn.gate.weight.float(), dim=1),
            "up": F.normalize(layer.ffn.up.weight.float(), dim=1),
        }
        rows["both"] = torch.cat([rows["gate"], rows["up"]], dim=1)
        rows_NF = rows[inputs.config.clustered_rows]
        expert_N = balanced_kmeans(rows_NF, num_experts, inputs.config, layer.generator)
        centre_EF = means(rows_NF, expert_N, num_experts)
        expert_N = optimal_assignment(squared_distance(rows_NF, centre_EF))
        router_ED = similarity_router(layer, expert_N, num_experts)
        own = predictor(layer, expert_N, router_ED, inputs.config)
        yield LayerSplit(layer=layer, expert_of_neuron_N=expert_N, router_ED=router_ED, own=own)


def similarity_router(
    layer: Layer, expert_N: Int[Tensor, " N"], num_experts: int
) -> Float[Tensor, "E D"]:
    """Direction of the mean unit gate row of each expert (MoEfication's similarity selection)."""
    rows_ND = F.normalize(layer.ffn.gate.weight.float(), dim=1)
    return F.normalize(means(rows_ND, expert_N, num_experts), dim=1)
