"""Auxiliary router losses: pure functions of logits and mask."""

import torch
from jaxtyping import Float
from torch import Tensor


def z_loss(logits_TE: Float[Tensor, "T E"]) -> Float[Tensor, ""]:
    """Mean over tokens of logsumexp(L)^2 (eq:z_loss); keeps router logits small.

    Gradient: through the logits.
    """
    return torch.logsumexp(logits_TE, dim=1).square().mean()


def balance_loss(
    logits_TE: Float[Tensor, "T E"], mask_TE: Float[Tensor, "T E"]
) -> Float[Tensor, ""]:
    """Load balancing E * sum_e f_e * p_e (eq:balance_loss).

    f_e is the share of tokens routed to expert e, p_e the mean softmax probability of e over all
    tokens and all experts (not renormalised over the chosen ones, which would make it a constant).

    Returns:
        k when all experts are used evenly; E when the same k experts run for every token.

    Gradient:
        Through p_e only; f_e is a count.
    """
    share_E = mask_TE.detach().mean(dim=0)
    probability_E = torch.softmax(logits_TE, dim=1).mean(dim=0)
    return logits_TE.shape[1] * (share_E * probability_E).sum()
