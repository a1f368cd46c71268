"""ExpertWeaver: clusters of neurons by their use across texts, with experts that always run.

From the original: a neuron's profile is its mean SiLU(w_gate x) on each of many texts. A neuron is
special if its coefficient of variation over texts (standard deviation over mean absolute value)
exceeds 0.6. The share of special neurons in a layer sets the width of its shared expert: from 0.7
of the FFN if none is special down to 0.2 if all are. The neurons of largest mean absolute value are
shared; balanced k-means on the profiles of the others makes the experts, whose router rows are
their mean gate rows.
Different here: texts are the sequences of the calibration text (the original has 42 tasks). Layers
of a layout cannot differ in size, so whole experts that always run stand for the shared one: a
share of the k active experts, by the original's law and its setting of three quarters active; at
least one is left to the router. The layout's router is a ridge regression to the scores, in which
shared experts have the largest.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from dotmoe.method.calibrate import RidgeRouter
from dotmoe.method.router import top_k_mask
from dotmoe.rivals.baselines.contract import LayerSplit, SplitInputs, balanced_kmeans, means

_SPECIAL = 0.6
"""Coefficient of variation above which a neuron is special."""
_LEAST, _MOST = 0.2 / 0.75, 0.7 / 0.75
"""Share of the active neurons that always run: if all neurons are special, if none is."""


def expert_weaver(inputs: SplitInputs) -> Iterator[LayerSplit]:
    """Split every layer into experts that always run, and experts that are clusters of profiles."""
    split = inputs.granularity
    for layer in inputs.layers():
        ffn, dtype = layer.ffn, layer.ffn.gate.weight.dtype
        gate_TN = ffn.activation.apply(ffn.gate(layer.x_TD.to(dtype))).float()
        texts_BTN = gate_TN.view(len(inputs.tokens_BT), -1, split.units)
        profile_NB = texts_BTN.mean(dim=1).T.contiguous()
        size_N = profile_NB.abs().mean(dim=1)
        special = float((profile_NB.std(dim=1) > _SPECIAL * size_N).float().mean())
        share = _MOST - (_MOST - _LEAST) * special
        shared = min(round(share * split.active_experts), split.active_experts - 1)
        # The first experts hold the neurons of largest mean absolute profile, and always run.
        always = shared * split.expert_size
        order_N = size_N.argsort(descending=True, stable=True)
        expert_N = torch.empty_like(order_N)
        expert_N[order_N[:always]] = torch.arange(always).to(order_N) // split.expert_size
        routed = order_N[always:]
        cluster_N = balanced_kmeans(profile_NB[routed], split.num_experts - shared, layer.generator)
        expert_N[routed] = shared + cluster_N.to(order_N)
        gate_ED = means(layer.ffn.gate.weight.float(), expert_N, split.num_experts)
        always_E = torch.arange(split.num_experts, device=gate_ED.device) < shared
        score_TE = layer.x_TD @ gate_ED.T
        target_TE = score_TE.masked_fill(always_E, float(score_TE.max()))
        router_ED = RidgeRouter(layer.x_TD, inputs.calibrate.ridge)(target_TE)
        yield LayerSplit(layer, expert_N, router_ED, {"router": gate_ED, "always": always_E})


def by_shared_and_gates(
    own: Mapping[str, Tensor], x_TD: Tensor, hidden_TN: Tensor, k: int
) -> Tensor:
    """The experts that always run and those with the largest gate scores, k in total."""
    score_TE = x_TD.float() @ own["router"].T
    return top_k_mask(score_TE.masked_fill(own["always"].bool(), torch.inf), k)
