"""Token-to-expert routing: logits, the binary top-k mask, its soft surrogates, its losses."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dotmoe.common.precision import in_float32
from dotmoe.method.config import Surrogate

Routed = tuple[Float[Tensor, "T E"], Int[Tensor, "T K"]]
"""The float32 mask, and the chosen experts of each token, largest logit first."""

_ITERATIONS = 16
"""Maximum number of Newton or bisection steps of the soft top-k."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How split layers route tokens."""

    active_experts: int
    surrogate: Surrogate | None = None
    """Soft mask that provides the mask's gradient; None: the mask has no gradient."""
    in_model_dtype: bool = False
    """True: logits are computed in the dtype of the router's rows (paper), not in float32."""
    mean_if_unchosen: bool = True
    """How sparse FFNs fill the mask's gradient of experts that did not run: by the mean of those
    that did, or by 0 (paper)."""

    def logits(self, x_TD: Float[Tensor, "T D"], router_ED: Float[Tensor, "E D"]) -> Tensor:
        """Logits of one layer, as float32 numbers."""
        if self.in_model_dtype:
            return (x_TD.to(router_ED.dtype) @ router_ED.T).float()
        return router_logits(x_TD, router_ED)

    def route(self, logits_TE: Float[Tensor, "T E"]) -> Routed:
        """Route the tokens of one layer (eq:router_topk, eq:router_ste)."""
        routed = straight_through_top_k(logits_TE, self.active_experts, self.surrogate)
        if self.surrogate is not None:
            # Computed even if not collected: a recomputed layer must repeat the same operations.
            losses = {name: loss(logits_TE, routed[0]) for name, loss in ROUTER_LOSSES.items()}
            if (collected := _COLLECTED.get()) is not None:
                collected.setdefault(id(self), []).append(losses)
        return routed


@contextmanager
def router_losses() -> Iterator[Callable[[], dict[str, Tensor]]]:
    """Collect the router losses of a forward pass within this context.

    Yields a function that gives them by the names of `ROUTER_LOSSES`: means over the layers that
    share a `Routing`, summed over these. Layers that are recomputed later are not collected.
    """
    collected: _Collected = {}

    def total(name: str) -> Tensor:
        means = []
        for layers in collected.values():
            mean = torch.stack([losses[name] for losses in layers]).mean()
            means.append(mean)
        return torch.stack(means).sum()

    def totals() -> dict[str, Tensor]:
        return {name: total(name) for name in ROUTER_LOSSES}

    token = _COLLECTED.set(collected)
    try:
        yield totals
    finally:
        _COLLECTED.reset(token)


@contextmanager
def dense_only() -> Iterator[None]:
    """Within this context, split layers run all their units and no router: the model is dense."""
    token = _IS_DENSE.set(True)
    try:
        yield
    finally:
        _IS_DENSE.reset(token)


def is_dense() -> bool:
    """Whether split layers run within `dense_only`."""
    return _IS_DENSE.get()


def z_loss(logits_TE: Float[Tensor, "T E"]) -> Float[Tensor, ""]:
    """Mean over tokens of logsumexp(L)^2 (eq:z_loss); keeps router logits small."""
    return torch.logsumexp(logits_TE, dim=1).square().mean()


def balance_loss(
    logits_TE: Float[Tensor, "T E"], mask_TE: Float[Tensor, "T E"]
) -> Float[Tensor, ""]:
    """Load balancing E * sum_e f_e * p_e (eq:balance_loss).

    f_e is the share of tokens routed to expert e, a count without a gradient. p_e is its mean
    softmax probability over all tokens and experts (over the chosen ones it would be a constant).
    The loss ranges from k (all experts used evenly) to E (the same k experts for every token).
    """
    share_E = mask_TE.detach().mean(dim=0)
    probability_E = torch.softmax(logits_TE, dim=1).mean(dim=0)
    return logits_TE.shape[1] * (share_E * probability_E).sum()


ROUTER_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "z": lambda logits_TE, mask_TE: z_loss(logits_TE),
    "balance": balance_loss,
}
"""Losses of one layer's router, functions of its logits and mask, by name."""
_Collected = dict[int, list[dict[str, Tensor]]]
"""Losses of each call, by the identity of its `Routing`."""
_COLLECTED: ContextVar[_Collected | None] = ContextVar("collected router losses", default=None)
_IS_DENSE = ContextVar("split layers are dense", default=False)


def router_logits(x_TD: Float[Tensor, "T D"], router_ED: Float[Tensor, "E D"]) -> Tensor:
    """Router logits L = X W_r^T in float32 (eq:router_logits), whatever the model's dtype.

    In bfloat16 about 7 % of tokens tie at the k-th place, and every server breaks ties differently.
    """
    result: Tensor = _Logits.apply(x_TD.float(), router_ED.float())  # type: ignore[no-untyped-call]
    return result


class _Logits(torch.autograd.Function):
    """X W_r^T whose products, also those of the gradient, nothing can lower to TF32."""

    @staticmethod
    @in_float32()
    def forward(ctx: Any, x_TD: Tensor, router_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, router_ED)
        return x_TD @ router_ED.T

    @staticmethod
    @in_float32()
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, router_ED = ctx.saved_tensors
        is_wanted = ctx.needs_input_grad
        return (
            grad_TE @ router_ED if is_wanted[0] else None,
            grad_TE.T @ x_TD if is_wanted[1] else None,
        )


def top_k_mask(logits_TE: Float[Tensor, "T E"], active_experts: int) -> Float[Tensor, "T E"]:
    """Binary routing mask R (eq:router_topk): 1 for the k largest logits of a token, else 0."""
    return straight_through_top_k(logits_TE, active_experts, None)[0]


def straight_through_top_k(
    logits_TE: Float[Tensor, "T E"], active_experts: int, surrogate: Surrogate | None
) -> Routed:
    """The binary top-k mask, with the gradient of a soft mask or with none (eq:router_ste)."""
    chosen_TK = logits_TE.detach().topk(active_experts, dim=1).indices
    mask_TE = torch.zeros_like(logits_TE).detach().scatter_(1, chosen_TK, 1.0)
    if surrogate is None:
        return mask_TE, chosen_TK
    if surrogate == "softmax":
        soft = torch.softmax(logits_TE, dim=1)
    else:
        soft = soft_top_k(logits_TE, active_experts)
    # The added term is exactly 0 and carries the gradient of the surrogate.
    return mask_TE + (soft - soft.detach()), chosen_TK


def soft_top_k(logits_TE: Float[Tensor, "T E"], active_experts: int) -> Float[Tensor, "T E"]:
    """Soft routing mask whose rows sum to k, as the binary mask's do.

        S = sigmoid(L - theta_t)   with theta_t such that   sum_e S[t, e] = k

    This is entropic transport of k units over E experts of capacity 1. Entries are in (0, 1), all
    ones at k = E; each row sums to k within 1e-4, for logits below 100. Logits are float32 or
    float64.

    Gradient:
        Implicit in theta: with w = S (1 - S), `dL = w * (g - sum(w g) / sum(w))`.
        A row's gradient sums to zero, so no token pushes all its logits up.
    """
    result: Tensor = _SoftTopK.apply(logits_TE, active_experts)  # type: ignore[no-untyped-call]
    return result


class _SoftTopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, active_experts: int) -> Tensor:
        soft = _sigmoids_that_sum_to_k(logits_TE, active_experts)
        ctx.save_for_backward(soft)
        return soft

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, ...]:
        (soft,) = ctx.saved_tensors
        weight = soft * (1 - soft)
        total = weight.sum(dim=1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)
        mean = (weight * grad_TE).sum(dim=1, keepdim=True) / total
        return weight * (grad_TE - mean), None


def _sigmoids_that_sum_to_k(logits_TE: Tensor, active_experts: int) -> Tensor:
    """sigmoid(x - theta) where sum_e sigmoid(x_e - theta) = k for every token."""
    num_experts, info = logits_TE.shape[1], torch.finfo(logits_TE.dtype)
    if active_experts == num_experts:
        return torch.ones_like(logits_TE)
    # Newton steps stay inside a bracket. With x sorted descending, k - 1 + (E - k + 1) exp(-a) < k
    # bounds theta from above by x_k + a; (k + 1) (1 - exp(-b)) >= k from below by x_(k+1) - b.
    *_, kth_T, next_T = logits_TE.topk(active_experts + 1, dim=1).values.unbind(1)
    low = next_T.unsqueeze(1) - math.log(active_experts + 1)
    high = kth_T.unsqueeze(1) + math.log(num_experts)
    theta = (low + high) / 2
    for _ in range(_ITERATIONS):
        soft = torch.sigmoid(logits_TE - theta)
        excess = soft.sum(dim=1, keepdim=True) - active_experts
        # On other devices this check would wait for the device.
        if soft.device.type == "cpu" and excess.abs().max() <= num_experts * info.eps:
            return soft
        low = torch.where(excess > 0, theta, low)
        high = torch.where(excess > 0, high, theta)
        slope = (soft * (1 - soft)).sum(dim=1, keepdim=True)
        newton = theta + excess / slope.clamp_min(info.tiny)
        inside = (newton >= low) & (newton <= high)
        theta = torch.where(inside, newton, (low + high) / 2)
    return torch.sigmoid(logits_TE - theta)
