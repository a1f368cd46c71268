"""MoEfication's trained router: two layers with tanh between, one output an expert.

From the original: Linear, tanh, Linear; the first starts as the mean unit rows of the experts, the
second as the identity. The target of a token is each expert's summed activation over the largest
one; binary cross-entropy, Adam with rate 0.01; the k experts of largest output run.
Different here: activations are of SiLU, which has negative ones, so their sizes are summed; of all
passes the one with the smallest loss on every tenth token, kept out, is taken (the published code
keeps the second best).
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dotmoe.baselines.contract import BaselineConfig, Layer
from dotmoe.calibrate import activations, expert_sums
from dotmoe.moe.router import top_k_mask

_TOKENS_A_STEP = 512
_RATE = 0.01


@torch.enable_grad()
def predictor(
    layer: Layer,
    expert_N: Int[Tensor, " N"],
    centre_ED: Float[Tensor, "E D"],
    config: BaselineConfig,
) -> dict[str, Tensor]:
    """Weights of the router: `first` [E, D], `second` [E, E]; none for another `split_router`."""
    if config.split_router == "ridge":
        return {}
    with torch.no_grad():
        hidden_TN = activations(layer.ffn, layer.x_TD.to(layer.ffn.down.weight.dtype))
        target_TE = expert_sums(hidden_TN.abs(), expert_N, len(centre_ED))
        target_TE /= target_TE.amax(dim=1, keepdim=True).clamp_min(1e-30)
    is_kept_T = torch.arange(len(target_TE), device=target_TE.device) % 10 == 9
    trained_T = (~is_kept_T).nonzero().squeeze(1)
    weights = {"first": centre_ED.clone(), "second": torch.eye(len(centre_ED)).to(centre_ED)}
    adam = torch.optim.Adam([w.requires_grad_() for w in weights.values()], lr=_RATE)

    def loss(tokens_T: Tensor) -> Tensor:
        logits_TE = scores(weights, layer.x_TD[tokens_T])
        return F.binary_cross_entropy_with_logits(logits_TE, target_TE[tokens_T])

    best, least = {}, torch.inf
    for _ in range(config.predictor_epochs):
        order = torch.randperm(len(trained_T), generator=layer.generator)
        for part in torch.split(trained_T[order.to(trained_T.device)], _TOKENS_A_STEP):
            adam.zero_grad()
            loss(part).backward()  # type: ignore[no-untyped-call]
            adam.step()
        with torch.no_grad():
            reached = float(loss(is_kept_T))
        if reached < least:
            least = reached
            best = {name: weight.detach().clone() for name, weight in weights.items()}
    return best


def scores(own: Mapping[str, Tensor], x_TD: Tensor) -> Float[Tensor, "T E"]:
    """What the router makes of FFN inputs."""
    return torch.tanh(x_TD.float() @ own["first"].T) @ own["second"].T


def by_predictor(
    own: Mapping[str, Tensor], x_TD: Tensor, hidden_TN: Tensor, active_experts: int
) -> Tensor:
    """The k experts that the predictor scores highest."""
    return top_k_mask(scores(own, x_TD), active_experts)
