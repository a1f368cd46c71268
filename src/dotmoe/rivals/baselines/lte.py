"""LTE: clusters of neurons by weight direction; an expert runs if its gate exceeds one half.

From the original: experts are clusters of gate rows by balanced k-means; each has its own gate G =
sigmoid(w_e x), independent of the others. In the soft stage all experts run, weighted by their
gates, and the loss has three terms: next-token cross-entropy; eta * mean G^2, which makes gates
small; and the mean of 1 / (G - 1/2)^2, which keeps them off the threshold. Then an expert runs with
weight 1 if its gate exceeds one half, so the number of experts differs from token to token.
Different here: the dense weights stay as they are (the original trains them in both stages:
`experiments/lte_stages.py`). eta is not set by hand: a controller moves it, below 0 if needed, so
that the mean share of experts above the threshold approaches the budget. The last term is bounded
near the threshold, where single tokens would dominate the gradient. A gate has no bias, so the
layout's router has the same rows, and the k largest logits run.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from dotmoe.method.calibrate import unit_logits
from dotmoe.models.dense_model import DenseModel
from dotmoe.rivals.baselines.contract import LayerSplit, SplitInputs, gated, next_token_loss
from dotmoe.rivals.baselines.moefication import weight_clusters

THRESHOLD = 0.5
_SEPARATION, _BOUND = 1e-2, 1e-2
"""Weight of the term that keeps gates off the threshold, and the constant added to (G - 1/2)^2."""
_PROPORTIONAL, _INTEGRAL = 5.0, 0.1
"""Gains of the controller, which acts on the relative excess of the active share."""
_RATE, _TOKENS_A_STEP = 3e-3, 1_024


def lte(inputs: SplitInputs) -> Iterator[LayerSplit]:
    """Split every layer as `weight_clusters` does, and train the gates of all layers together."""
    split, config = inputs.granularity, inputs.config
    splits = weight_clusters(replace(inputs, config=replace(config, split_router="ridge")))
    if config.split_router == "ridge":
        yield from splits
        return
    generator = None
    clusters = list[Tensor]()
    routers = list[Tensor]()
    for each in splits:  # of each layer only this is kept, not its inputs
        generator = generator or each.layer.generator
        random_ED = torch.randn(each.router_ED.shape, generator=generator).to(each.router_ED)
        routers.append(unit_logits(random_ED, each.layer.x_TD).requires_grad_())
        clusters.append(each.expert_of_neuron_N)
    experts = dict(list(enumerate(clusters))[split.first_dense_layers :])
    rows = max(1, _TOKENS_A_STEP // inputs.tokens_BT.shape[1])
    batches = (
        inputs.tokens_BT[torch.randperm(len(inputs.tokens_BT), generator=generator)[:rows]]
        for _ in range(config.lte_steps)
    )
    share = split.active_experts / split.num_experts
    adam = torch.optim.Adam([routers[i] for i in experts], lr=_RATE)
    for _ in soft_stage(inputs.dense, batches, experts, routers, share, adam):
        pass
    for layer, expert_N, router_ED in zip(inputs.layers(), clusters, routers, strict=True):
        yield LayerSplit(layer, expert_N, router_ED.detach(), {"router": router_ED.detach()})


def soft_stage(
    dense: DenseModel,
    batches: Iterable[Tensor],
    experts: Mapping[int, Int[Tensor, " N"]],
    routers: list[Tensor],
    share: float,
    optimizer: torch.optim.Optimizer,
) -> Iterator[dict[str, float]]:
    """Take steps of the soft stage over batches of tokens [B, T], and yield the metrics of each.

    `share` is the mean share of experts whose gates should be above the threshold.
    """
    gates = list[Tensor]()

    def gate(layer: int, x_TD: Tensor, _: Tensor) -> Tensor:
        gates.append(torch.sigmoid(x_TD.float() @ routers[layer].T))
        return gates[-1]

    eta = integral = 0.0
    for tokens_BT in batches:
        gates.clear()
        with torch.enable_grad(), gated(dense, experts, gate):
            loss = next_token_loss(dense, tokens_BT)
            G_LTE = torch.stack(gates)
            separation = 1 / ((G_LTE - THRESHOLD).square() + _BOUND)
            total = loss + eta * G_LTE.square().mean() + _SEPARATION * separation.mean()
            torch.autograd.backward(total)
        stepped(optimizer)
        reached = float((G_LTE > THRESHOLD).float().mean())
        yield {"ce": float(loss.detach()), "share": reached, "eta": eta}
        integral += _INTEGRAL * (reached / share - 1)
        eta = integral + _PROPORTIONAL * (reached / share - 1)


def stepped(optimizer: torch.optim.Optimizer) -> None:
    """Take an optimizer step with the gradient norm clipped to 1, and clear the gradients."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad()


def above_threshold(own: Mapping[str, Tensor], x_TD: Tensor, hidden_TN: Tensor, k: int) -> Tensor:
    """Mask of the experts whose gates are above the threshold, however many."""
    return (torch.sigmoid(x_TD.float() @ own["router"].T) > THRESHOLD).float()
