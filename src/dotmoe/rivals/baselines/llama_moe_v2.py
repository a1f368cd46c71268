"""LLaMA-MoE v2's gradient split: neurons by their importance to the loss on an expert's tokens.

From the original: k-means on FFN inputs gives centres, which are the router's rows; a token belongs
to the expert whose row has the largest dot product with its input. The importance of a neuron to an
expert is the mean over the expert's tokens of |H * dL/dH|, where L is the next-token loss. Experts
with room take neurons greedily, the most important free one first. In the residual form, a shared
expert first takes the neurons that are in most experts' lists of their best.
Different here: clusters of inputs have equal size (the original allows 40 % around it); neurons in
equally many lists are ordered by summed importance; experts are added with weight 1 instead of a
renormalised softmax times a constant; the dense weights are not trained afterwards. A dot product
does not choose the nearest centre; it is what the original runs.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from dotmoe.common.errors import UserError
from dotmoe.method.layout import ALWAYS_ON
from dotmoe.method.masked import sums_by_expert
from dotmoe.method.transport import greedy_assignment
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.hooks import input_hooks
from dotmoe.rivals.baselines.contract import (
    LayerSplit,
    SplitInputs,
    balanced_kmeans,
    cluster_means,
    next_token_loss,
)


def llama_moe_v2(inputs: SplitInputs) -> Iterator[LayerSplit]:
    """Split every layer by importance, in the residual form if `granularity` has shared neurons."""
    split = inputs.granularity
    num_tokens = inputs.tokens_BT.numel()
    if num_tokens < split.num_experts:
        raise UserError(
            f"calibration_tokens gives {num_tokens} tokens, but llama_moe_v2 needs at least "
            f"one for each of {split.num_experts} experts. Raise calibration_tokens."
        )
    routers, experts = list[Tensor](), list[Tensor]()
    for layer in inputs.layers():  # of each layer only these are kept, not its inputs
        # The last T mod E tokens are left out.
        whole_TD = layer.x_TD[: len(layer.x_TD) // split.num_experts * split.num_experts]
        cluster_T = balanced_kmeans(whole_TD, split.num_experts, layer.generator)
        routers.append(cluster_means(whole_TD, cluster_T, split.num_experts))
        experts.append((layer.x_TD @ routers[-1].T).argmax(dim=1))
    scores = importance(inputs.dense, inputs.tokens_BT, experts, split.num_experts)
    for layer, router_ED, score_NE in zip(inputs.layers(), routers, scores, strict=True):
        expert_N = torch.full((split.units,), ALWAYS_ON, device=score_NE.device)
        free_N = torch.ones_like(expert_N, dtype=torch.bool)
        free_N[most_listed(score_NE, split.expert_size)[: split.shared_size]] = False
        expert_N[free_N] = greedy_assignment(score_NE[free_N], capacity=split.expert_size)
        yield LayerSplit(layer, expert_N, router_ED)


def importance(
    dense: DenseModel, tokens_BT: Tensor, experts: list[Tensor], num_experts: int, rows: int = 4
) -> list[Float[Tensor, "N E"]]:
    """Mean |H * dL/dH| of each neuron over each expert's tokens, for each layer; 0 without tokens.

    L is the summed next-token loss. `experts` holds, for each layer, the expert of each token of
    the text, [T]; `rows` sequences run at once. Weights get no gradient.
    """
    sums = [torch.zeros(num_experts, dense.widths.ffn, device=e.device) for e in experts]
    hidden: dict[int, Tensor] = {}

    def keep(index: int, hidden_BTN: Tensor) -> None:
        hidden[index] = hidden_BTN.requires_grad_()  # H of the frozen first layer has none

    layers = dense.family.layers(dense.model)
    downs = {index: dense.family.ffn(layer).down for index, layer in enumerate(layers)}
    with input_hooks(downs, keep):
        for first in range(0, len(tokens_BT), rows):
            with torch.enable_grad():
                loss = next_token_loss(dense, tokens_BT[first : first + rows], summed=True)
                slopes = torch.autograd.grad(loss, list(hidden.values()))
            here = slice(first * tokens_BT.shape[1], (first + rows) * tokens_BT.shape[1])
            for index, (expert_T, slope_BTN) in enumerate(zip(experts, slopes, strict=True)):
                worth_TN = (hidden[index].detach() * slope_BTN).abs().float().flatten(0, -2)
                sums[index] += sums_by_expert(worth_TN.T, expert_T[here], num_experts).T
    counts = [torch.bincount(expert_T, minlength=num_experts) for expert_T in experts]
    return [(s / c.clamp(min=1)[:, None]).T.contiguous() for s, c in zip(sums, counts, strict=True)]


def most_listed(score_NE: Float[Tensor, "N E"], list_length: int) -> Tensor:
    """Neurons by how many experts have them among their `list_length` best, most first."""
    best = score_NE.topk(list_length, dim=0).indices
    listed_N = torch.bincount(best.flatten(), minlength=len(score_NE))
    by_worth = score_NE.sum(dim=1).argsort(descending=True, stable=True)
    return by_worth[listed_N[by_worth].argsort(descending=True, stable=True)]
