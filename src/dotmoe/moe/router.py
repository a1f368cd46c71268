"""Token-to-expert routing: logits, the binary top-k mask, its soft surrogates, its losses."""

import importlib
import importlib.util
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dotmoe.moe.losses import balance_loss, z_loss

Surrogate = Literal["softmax", "soft_top_k"]

HAS_TRITON = importlib.util.find_spec("triton") is not None


class Routed(NamedTuple):
    """Where each token goes."""

    mask_TE: Float[Tensor, "T E"]
    """Entries 0 and 1, float32; carries the gradient of the surrogate, if there is one."""
    chosen_TK: Int[Tensor, "T K"]
    """Experts of each token, largest logit first."""


@dataclass(kw_only=True)
class Routing:
    """How the split layers of one model route, and the losses that they leave."""

    active_experts: int
    surrogate: Surrogate | None = None
    """Soft stand-in for the mask's gradient; None: the mask is not differentiated."""
    surrogate_temperature: float = 1.0
    enabled: bool = True
    """False: the model is dense; all neurons run for every token, and no router does."""
    losses: list[tuple[Tensor, Tensor]] | None = None
    """z-loss and balance loss of each layer of the running forward pass; None: not wanted."""

    def route(self, logits_TE: Float[Tensor, "T E"]) -> Routed:
        """Route the tokens of one layer (eq:router_topk, eq:router_ste)."""
        if self.surrogate is None:
            chosen_TK = _largest(logits_TE, self.active_experts).indices[:, : self.active_experts]
            return Routed(_marked(logits_TE, chosen_TK), chosen_TK)
        routed = straight_through_top_k(
            logits_TE,
            self.active_experts,
            surrogate=self.surrogate,
            temperature=self.surrogate_temperature,
        )
        # Computed even where they are not wanted: a layer that runs again must do the same again.
        z, balance = z_loss(logits_TE), balance_loss(logits_TE, routed.mask_TE)
        if self.losses is not None:
            self.losses.append((z, balance))
        return routed

    def want_losses(self) -> None:
        """Collect the losses of the next forward pass."""
        self.losses = []

    def pop_losses(self) -> tuple[Tensor, Tensor]:
        """z-loss and balance loss of the last forward pass, averaged over layers.

        None is collected from here on: a layer that runs again in the backward pass would leave
        losses that hold all its activations.
        """
        z, balance = zip(*(self.losses or []), strict=True)
        self.losses = None
        return torch.stack(z).mean(), torch.stack(balance).mean()


_ITERATIONS = 16
"""Newton or bisection steps of the soft top-k at most."""


def router_logits(x_TD: Float[Tensor, "T D"], router_ED: Float[Tensor, "E D"]) -> Tensor:
    """Router logits L = X W_r^T in float32 (eq:router_logits), whatever the model's dtype.

    With bfloat16 logits about 7 % of tokens tie at the k-th place, and every server breaks ties in
    its own way.

    Returns:
        Logits [T, E], float32. Gradient: through both arguments.
    """
    return x_TD.float() @ router_ED.float().T


def top_k_mask(logits_TE: Float[Tensor, "T E"], active_experts: int) -> Float[Tensor, "T E"]:
    """Binary routing mask R (eq:router_topk): 1 for the k largest logits of a token, else 0.

    Softmax keeps the order, so the top k of logits and of probabilities are the same experts. Not
    differentiable.

    Example:
        >>> top_k_mask(torch.tensor([[0.1, 3.0, 2.0]]), 2)
        tensor([[0., 1., 1.]])
    """
    chosen_TK = _largest(logits_TE, active_experts).indices[:, :active_experts]
    return _marked(logits_TE, chosen_TK)


def _marked(logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
    return torch.zeros_like(logits_TE).scatter_(1, chosen_TK, 1.0)


def _largest(logits_TE: Tensor, active_experts: int) -> torch.return_types.topk:
    """The k + 1 largest logits of each token in descending order, E where k is E."""
    count = min(active_experts + 1, logits_TE.shape[1])
    return logits_TE.detach().topk(count, dim=1)


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
    largest_TK = _largest(logits_TE, active_experts).values
    result: Tensor = _SoftTopK.apply(  # type: ignore[no-untyped-call]
        logits_TE, largest_TK, active_experts, temperature
    )
    return result


class _SoftTopK(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TE: Tensor, largest_TK: Tensor, active_experts: int, temperature: float
    ) -> Tensor:
        soft = _saturated(logits_TE / temperature, largest_TK / temperature, active_experts)
        ctx.save_for_backward(soft)
        ctx.temperature = temperature
        return soft

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, ...]:
        (soft,) = ctx.saved_tensors
        weight = soft * (1 - soft)
        total = weight.sum(dim=1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)
        mean = (weight * grad_TE).sum(dim=1, keepdim=True) / total
        return weight * (grad_TE - mean) / ctx.temperature, None, None, None


def _saturated(scaled_TE: Tensor, largest_TK: Tensor, active_experts: int) -> Tensor:
    """sigmoid(x - theta) where sum_e sigmoid(x_e - theta) = k for every token.

    The root theta is found by Newton steps kept inside a bracket. With x sorted descending,
    k - 1 + (E - k + 1) exp(-a) < k bounds theta from above at x_k + a, and
    (k + 1) (1 - exp(-b)) >= k from below at x_(k+1) - b.
    """
    num_experts = scaled_TE.shape[1]
    if active_experts == num_experts:
        return torch.ones_like(scaled_TE)
    low = largest_TK[:, active_experts:] - math.log(active_experts + 1)
    high = largest_TK[:, active_experts - 1 : active_experts] + math.log(num_experts)
    if triton_runs_on(scaled_TE):
        fused: Tensor = triton_kernels().soft_top_k(
            scaled_TE, low, high, active_experts, iterations=_ITERATIONS
        )
        return fused
    tolerance = num_experts * torch.finfo(scaled_TE.dtype).eps
    theta = (low + high) / 2
    for _ in range(_ITERATIONS):
        soft = torch.sigmoid(scaled_TE - theta)
        excess = soft.sum(dim=1, keepdim=True) - active_experts
        # Elsewhere than on a CPU the question would wait for the device.
        if soft.device.type == "cpu" and excess.abs().max() <= tolerance:
            return soft
        low = torch.where(excess > 0, theta, low)
        high = torch.where(excess > 0, high, theta)
        slope = (soft * (1 - soft)).sum(dim=1, keepdim=True)
        newton = theta + excess / slope.clamp_min(torch.finfo(soft.dtype).tiny)
        inside = (newton >= low) & (newton <= high)
        theta = torch.where(inside, newton, (low + high) / 2)
    return torch.sigmoid(scaled_TE - theta)


def straight_through_top_k(
    logits_TE: Float[Tensor, "T E"],
    active_experts: int,
    *,
    surrogate: Surrogate,
    temperature: float = 1.0,
) -> Routed:
    """The binary mask forward, the gradient of a soft one backward (eq:router_ste).

    Args:
        logits_TE: Router logits.
        active_experts: k.
        surrogate: `softmax` is the paper's; `soft_top_k` has rows of the mask's own sum.
        temperature: Of `soft_top_k`; the softmax has none.
    """
    largest = _largest(logits_TE, active_experts)
    chosen_TK = largest.indices[:, :active_experts]
    if surrogate == "softmax":
        soft = torch.softmax(logits_TE, dim=1)
    else:
        soft = _SoftTopK.apply(  # type: ignore[no-untyped-call]
            logits_TE, largest.values, active_experts, temperature
        )
    # What is added is exactly 0, and has the gradient of the surrogate.
    mask_TE = _marked(logits_TE.detach(), chosen_TK) + (soft - soft.detach())
    return Routed(mask_TE, chosen_TK)


def triton_runs_on(tensor: Tensor) -> bool:
    """Whether `triton_kernels` can work on it: CUDA, 16 or 32 bits wide, Triton installed."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return HAS_TRITON and tensor.is_cuda and tensor.dtype in dtypes


def triton_kernels() -> Any:
    """The module of the kernels, which needs Triton."""
    return importlib.import_module("dotmoe.moe.triton_kernels")
