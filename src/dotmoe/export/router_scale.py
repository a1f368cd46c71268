"""The power of two that makes every gate 1 without changing which experts are chosen.

A served MoE weights its experts by a function of their logits. Router rows times 2^-p give all
experts the same weight but for `l 2^-p`, and keep their order; a constant of the architecture makes
that weight 1. p is bounded on both sides: gates deviate from 1 by about `l 2^-p / 2`, and most
runtimes rank experts after a softmax or sigmoid in float32, where logits closer than 2^(p-22)
become ties. At std(l) 2^-p = 2^-10.7 both losses are small.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dotmoe.artifacts import DenseModel
from dotmoe.errors import UserError
from dotmoe.layout import ExpertLayout
from dotmoe.moe.router import router_logits
from dotmoe.moe.surgery import masked_by

LOG2_SCALED_STD = -10.7
"""Target of log2(std(logits) 2^-p)."""
SMALLEST_EXPONENT, LARGEST_EXPONENT = -16, 48
"""Outside, a router is degenerate; inside, 2^-p W_r stays normal in bfloat16 and float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterScale:
    """How one layer's router is scaled, and what that costs on the calibration tokens."""

    exponent: int
    """p: the router is written as 2^-p W_r."""
    logit_std: float
    """Standard deviation of the unscaled logits over tokens and experts."""
    gate_deviation: float
    """Largest |2 sigmoid(l 2^-p) - 1| over tokens and experts."""
    misrouted_softmax_first: float
    """Share of tokens with another expert set where ranking follows a float32 softmax."""
    misrouted_sigmoid_first: float
    """The same for a float32 sigmoid."""


def router_scale(logits_TE: Float[Tensor, "T E"], active_experts: int) -> RouterScale:
    """Choose p for one layer and measure what it does.

        p = round(log2(std(l)) + 10.7)

    Args:
        logits_TE: Router logits of calibration tokens, float32.
        active_experts: k, 1 to E.

    Example:
        >>> router_scale(2.5 * torch.randn(64, 16), 4).exponent
        12
    """
    std = float(logits_TE.double().std(correction=0))
    exponent = 0
    if std > 0:
        exponent = round(math.log2(std) - LOG2_SCALED_STD)
        exponent = min(max(exponent, SMALLEST_EXPONENT), LARGEST_EXPONENT)
    scaled = logits_TE.float() * 2.0**-exponent
    gates = torch.sigmoid(scaled)
    shares = [
        float((shortfall(logits_TE, scores.topk(active_experts, dim=1).indices) > 0).float().mean())
        for scores in (torch.softmax(scaled, dim=1), gates)
    ]
    return RouterScale(
        exponent=exponent,
        logit_std=std,
        gate_deviation=float((2 * gates - 1).abs().max()),
        misrouted_softmax_first=shares[0],
        misrouted_sigmoid_first=shares[1],
    )


def router_scales(dense: DenseModel, layout: ExpertLayout, tokens_BT: Tensor) -> list[RouterScale]:
    """`router_scale` of every split layer, on what its router sees in the masked model."""
    scales: dict[int, RouterScale] = {}

    def watch(index: int, layer: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def measure(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            x_TD = arguments[0].reshape(-1, arguments[0].shape[-1])
            logits_TE = router_logits(x_TD, layout.router_LED[index].to(x_TD.device))
            scales[index] = router_scale(logits_TE, layout.active_experts)

        return layer.get_submodule("mlp").register_forward_pre_hook(measure)

    with torch.no_grad(), masked_by(dense, layout):
        layers = dense.family.layers(dense.model)
        hooks = [watch(index, layers[index]) for index in layout.moe_layers]
        try:
            dense.family.trunk(dense.model)(input_ids=tokens_BT.to(dense.device), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
    return [scales[index] for index in layout.moe_layers]


def shortfall(
    logits_TE: Float[Tensor, "T E"], chosen_TK: Int[Tensor, "T K"]
) -> Float[Tensor, " T"]:
    """How far the best expert left out lies above the worst one chosen; 0 or less: a right choice.

    Unlike a comparison of sets it does not count the two outcomes of an exact tie as different.

    Example:
        >>> shortfall(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([[0, 1]]))
        tensor([1.])
    """
    left_out = logits_TE.scatter(1, chosen_TK, -math.inf).amax(dim=1)
    return left_out - logits_TE.gather(1, chosen_TK).amin(dim=1)


def scaled_router(
    router_ED: Float[Tensor, "E D"], exponent: int, dtype: torch.dtype, *, layer: int
) -> Float[Tensor, "E D"]:
    """2^-p W_r in the written dtype, without rounding.

    Raises:
        UserError: An entry is not exact in that dtype.
    """
    exact = router_ED.cpu().double() * 2.0**-exponent
    scaled = exact.to(dtype)
    inexact = scaled.double() != exact
    if bool(inexact.any()):
        value = float(router_ED.cpu()[inexact][0])
        raise UserError(
            f"Router entry {value!r} of layer {layer} times 2^-{exponent} is not exact in {dtype}, "
            "so the export would route differently. Round the layout's routers to that dtype "
            "first, as the extract stage does."
        )
    return scaled.contiguous()
