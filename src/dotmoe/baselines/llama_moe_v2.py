"""Neurons by what the loss would miss on an expert's tokens: LLaMA-MoE v2's gradient split.

From the original: k-means on FFN inputs; its centres are the router's rows, used with a dot
product. A token belongs to the expert of its largest product. Importance of a neuron to an expert:
the mean over the expert's tokens of |H * dL/dH|, L the next-token loss. Again and again the expert
with room whose best free neuron is worth most takes it. In the residual form, a shared expert first
takes the neurons that stand in most experts' lists of their best.
Different here: clusters of inputs have one size (the original allows 40 % around it); ties between
neurons that stand in equally many lists go to the larger summed importance; experts are added with
weight 1 instead of a renormalised softmax times a constant; the dense weights are not trained
afterwards. A dot product is not the nearest centre (the centre's own norm is missing): that is
kept, since it is what the original runs and all that a router without biases can hold.
"""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from dotmoe.baselines.contract import LayerSplit, SplitInputs
from dotmoe.baselines.kmeans import balanced_kmeans, means
from dotmoe.layout import ALWAYS_ON
from dotmoe.models.dense import DenseModel
from dotmoe.transport import greedy_assignment

_TOKENS_OF_LOGITS = 1024
"""Tokens whose logits are held at a time."""


def llama_moe_v2(inputs: SplitInputs) -> Iterator[LayerSplit]:
    """Split every layer by importance; with shared neurons in `granularity`, the residual form."""
    split = inputs.granularity
    layers = list(inputs.layers())
    routers = [
        input_clusters(layer.x_TD, split.num_experts, inputs, layer.generator) for layer in layers
    ]
    importances = importance(inputs.dense, inputs.tokens_BT, routers)
    for layer, router_ED, importance_EN in zip(layers, routers, importances, strict=True):
        score_NE = importance_EN.T.contiguous()
        expert_N = torch.full((split.ffn_width,), ALWAYS_ON, device=score_NE.device)
        free_N = torch.ones_like(expert_N, dtype=torch.bool)
        free_N[most_listed(score_NE, split.expert_size)[: split.shared_size]] = False
        expert_N[free_N] = greedy_assignment(score_NE[free_N], capacity=split.expert_size)
        yield LayerSplit(layer=layer, expert_of_neuron_N=expert_N, router_ED=router_ED)


def input_clusters(
    x_TD: Float[Tensor, "T D"], num_experts: int, inputs: SplitInputs, generator: torch.Generator
) -> Float[Tensor, "E D"]:
    """Centres of E equal clusters of FFN inputs; the last T mod E tokens are left out."""
    whole_TD = x_TD[: len(x_TD) // num_experts * num_experts]
    expert_T = balanced_kmeans(
        whole_TD,
        num_experts,
        rounds=inputs.config.cluster_rounds,
        starts=inputs.config.cluster_starts,
        generator=generator,
    )
    return means(whole_TD, expert_T, num_experts)


def importance(
    dense: DenseModel, tokens_BT: Tensor, routers: list[Tensor], rows: int = 4
) -> list[Float[Tensor, "E N"]]:
    """Mean |H * dL/dH| of each neuron over the tokens of each expert, a layer each; 0 without any.

    Args:
        dense: The dense model; its weights get no gradient.
        tokens_BT: Text whose next-token loss L is summed.
        routers: Rows of each layer's router, [E, D]; a token's expert is its largest product.
        rows: Sequences of one forward and backward pass.
    """
    layers = list(dense.family.layers(dense.model))
    sums = [router.new_zeros(len(router), dense.widths.ffn) for router in routers]
    counts = [router.new_zeros(len(router)) for router in routers]
    experts: dict[int, Tensor] = {}
    hidden: dict[int, Tensor] = {}
    hooks = []
    for index, layer in enumerate(layers):
        see = partial(_see_input, index, routers[index], experts)
        hooks.append(layer.get_submodule("mlp").register_forward_pre_hook(see))
        keep = partial(_keep_hidden, index, hidden)
        hooks.append(dense.family.ffn(layer).down.register_forward_pre_hook(keep))
    try:
        for batch in torch.split(tokens_BT.long().to(dense.device), rows):
            _backward(dense, batch)
            for index in range(len(layers)):
                _add(hidden[index], experts[index], sums[index], counts[index])
    finally:
        for hook in hooks:
            hook.remove()
    return [
        sum_EN / count_E.clamp(min=1)[:, None] for sum_EN, count_E in zip(sums, counts, strict=True)
    ]


def most_listed(score_NE: Float[Tensor, "N E"], list_length: int) -> Tensor:
    """Neurons in falling order of how many experts have them among their best `list_length`."""
    best = score_NE.topk(list_length, dim=0).indices
    listed_N = torch.bincount(best.flatten(), minlength=len(score_NE))
    by_worth = score_NE.sum(dim=1).argsort(descending=True, stable=True)
    return by_worth[listed_N[by_worth].argsort(descending=True, stable=True)]


@torch.enable_grad()
def _backward(dense: DenseModel, tokens_BT: Tensor) -> None:
    """Backward of the next-token loss; logits of some tokens at a time, never of all."""
    head = dense.family.head(dense.model)
    divisor = dense.family.traits(dense.config).multipliers.logits_divisor
    trunk = dense.family.trunk(dense.model)
    hidden_BTD = trunk(input_ids=tokens_BT, use_cache=False).last_hidden_state
    leaf_BTD = hidden_BTD.detach().requires_grad_()
    hidden_TD, label_T = leaf_BTD[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten()
    parts = (torch.split(tensor, _TOKENS_OF_LOGITS) for tensor in (hidden_TD, label_T))
    for hidden_TD, label_T in zip(*parts, strict=True):
        logits_TV = head(hidden_TD).float() / divisor
        torch.autograd.backward(F.cross_entropy(logits_TV, label_T, reduction="sum"))
    torch.autograd.backward(hidden_BTD, leaf_BTD.grad)


def _see_input(
    index: int,
    router_ED: Tensor,
    experts: dict[int, Tensor],
    module: nn.Module,
    args: tuple[Tensor],
) -> None:
    x_TD = args[0].detach().reshape(-1, args[0].shape[-1])
    experts[index] = (x_TD.float() @ router_ED.T).argmax(dim=1)


def _keep_hidden(
    index: int, hidden: dict[int, Tensor], module: nn.Module, args: tuple[Tensor]
) -> None:
    kept = args[0]
    if kept.requires_grad:
        kept.retain_grad()
    else:  # the first layer of a frozen model
        kept.requires_grad_()
    hidden[index] = kept


@torch.no_grad()
def _add(hidden: Tensor, expert_T: Tensor, sum_EN: Tensor, count_E: Tensor) -> None:
    assert hidden.grad is not None
    worth_TN = (hidden * hidden.grad).abs().float().reshape(-1, hidden.shape[-1])
    sum_EN.index_add_(0, expert_T, worth_TN)
    count_E.index_add_(0, expert_T, torch.ones_like(expert_T, dtype=count_E.dtype))
