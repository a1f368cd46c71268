"""Token-to-expert routing: logits, the binary top-k mask, and two soft surrogates for it."""

import math
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

Surrogate = Literal["softmax", "soft_top_k"]


def router_logits(x_TD: Float[Tensor, "T D"], router_ED: Float[Tensor, "E D"]) -> Tensor:
    """Router logits L = X W_r^T in float32 (eq:router_logits), whatever the model's dtype.

    With bfloat16 logits about 7 % of tokens tie at the k-th place, and every server breaks ties in
    its own way.

    Returns:
        Logits [T, E], float32. Gradient: through both arguments.
    """
    with torch.autocast(x_TD.device.type, enabled=False):
        return x_TD.float() @ router_ED.float().T


def top_k_mask(logits_TE: Float[Tensor, "T E"], active_experts: int) -> Float[Tensor, "T E"]:
    """Binary routing mask R (eq:router_topk): 1 for the k largest logits of a token, else 0.

    Softmax keeps the order, so the top k of logits and of probabilities are the same experts. Not
    differentiable.

    Example:
        >>> top_k_mask(torch.tensor([[0.1, 3.0, 2.0]]), 2)
        tensor([[0., 1., 1.]])
    """
    chosen = logits_TE.detach().topk(active_experts, dim=1).indices
    return torch.zeros_like(logits_TE).scatter_(1, chosen, 1.0)


def soft_top_k(
    logits_TE: Float[Tensor, "T E"], active_experts: int, temperature: float
) -> Float[Tensor, "T E"]:
    """Soft routing mask whose rows sum to k, as the binary mask's do.

        S = sigmoid((L - theta_t) / temperature)   with theta_t such that   sum_e S[t, e] = k

    This is entropic transport of k units over E experts of capacity 1.

    Args:
        logits_TE: Router logits, float32 or float64.
        active_experts: k, 1 to E. At k = E the mask is all ones.
        temperature: In units of the logits, > 0. Small is sharp.

    Returns:
        Entries in (0, 1); each row sums to k within 1e-4.

    Gradient:
        Implicit in theta: with w = S (1 - S), `dL = w * (g - sum(w g) / sum(w)) / temperature`.
        A row's gradient sums to zero, so no token pushes all its logits up.
    """
    result: Tensor = _SoftTopK.apply(logits_TE, active_experts, temperature)  # type: ignore[no-untyped-call]
    return result


class _SoftTopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, active_experts: int, temperature: float) -> Tensor:
        scaled = logits_TE / temperature
        soft = torch.sigmoid(scaled - _threshold(scaled, active_experts))
        ctx.save_for_backward(soft)
        ctx.temperature = temperature
        return soft

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor, None, None]:
        (soft,) = ctx.saved_tensors
        weight = soft * (1 - soft)
        total = weight.sum(dim=1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)
        mean = (weight * grad_TE).sum(dim=1, keepdim=True) / total
        return weight * (grad_TE - mean) / ctx.temperature, None, None


def _threshold(scaled_TE: Tensor, active_experts: int, iterations: int = 16) -> Tensor:
    """Root theta of sum_e sigmoid(x_e - theta) = k, by Newton steps kept inside a bracket.

    With x sorted descending, k - 1 + (E - k + 1) exp(-a) < k bounds theta from above at x_k + a,
    and (k + 1) (1 - exp(-b)) >= k from below at x_(k+1) - b.
    """
    num_experts = scaled_TE.shape[1]
    if active_experts == num_experts:
        return torch.full_like(scaled_TE[:, :1], -math.inf)
    largest = scaled_TE.topk(active_experts + 1, dim=1).values
    low = largest[:, active_experts:] - math.log(active_experts + 1)
    high = largest[:, active_experts - 1 : active_experts] + math.log(num_experts)
    theta = (low + high) / 2
    for _ in range(iterations):
        soft = torch.sigmoid(scaled_TE - theta)
        excess = soft.sum(dim=1, keepdim=True) - active_experts
        low = torch.where(excess > 0, theta, low)
        high = torch.where(excess > 0, high, theta)
        slope = (soft * (1 - soft)).sum(dim=1, keepdim=True)
        newton = theta + excess / slope.clamp_min(torch.finfo(soft.dtype).tiny)
        inside = (newton >= low) & (newton <= high)
        theta = torch.where(inside, newton, (low + high) / 2)
    return theta


def straight_through_mask(
    logits_TE: Float[Tensor, "T E"],
    active_experts: int,
    *,
    surrogate: Surrogate,
    temperature: float = 1.0,
) -> Float[Tensor, "T E"]:
    """Binary mask forward, soft surrogate backward: R + (P - sg(P)) (eq:router_ste).

    Args:
        logits_TE: Router logits.
        active_experts: k, 1 to E.
        surrogate: `softmax` is the paper's P (eq:router_probs); `soft_top_k` has the mask's own
            row sum, k instead of 1.
        temperature: Of `soft_top_k`; the softmax has none.

    Returns:
        Exactly the entries of `top_k_mask`. Gradient: that of the surrogate.
    """
    hard = top_k_mask(logits_TE, active_experts)
    if surrogate == "softmax":
        soft = torch.softmax(logits_TE, dim=1)
    else:
        soft = soft_top_k(logits_TE, active_experts, temperature)
    return hard + (soft - soft.detach())
