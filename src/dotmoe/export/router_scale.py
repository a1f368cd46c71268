"""The power of two that makes every gate 1 without changing which experts are chosen.

A served MoE weights its experts by a function of their logits. Router rows times 2^-p give all
experts the same weight but for `l 2^-p`, and keep their order; a constant of the architecture makes
that weight 1. p is bounded on both sides: gates deviate from 1 by about `l 2^-p`, and most runtimes
rank experts after a softmax or sigmoid in float32, where logits closer than 2^(p-22) become ties.
At std(l) 2^-p = 2^-10.7 both losses are small.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dotmoe.artifacts import DenseModel
from dotmoe.errors import UserError
from dotmoe.export.gating import Gating
from dotmoe.export.runtime_routers import RuntimeRouting, runtime_routing, shortfall
from dotmoe.layout import ExpertLayout
from dotmoe.moe.router import router_logits
from dotmoe.moe.surgery import masked_by

__all__ = [
    "RouterScale",
    "router_exponent",
    "router_scale",
    "router_scales",
    "scaled_router",
    "shortfall",
]

LOG2_SCALED_STD = -10.7
"""Target of log2(std(logits) 2^-p)."""
OUTLIER = 8.0
"""Logits of an outlier token are that many times those of the median token."""
SMALLEST_EXPONENT, LARGEST_EXPONENT = -16, 48
"""Outside, a router is degenerate; inside, 2^-p W_r stays normal in bfloat16 and float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterScale:
    """How one layer's router is scaled, and what that costs on the calibration tokens."""

    exponent: int
    """p: the router is written as 2^-p W_r."""
    logit_std: float
    """`typical_std` of the unscaled logits."""
    expected_misrouted: float
    """Share of tokens that the rule leads to expect at other experts, in the weakest runtime."""
    expected_gate_deviation: float
    """Typical |gate - 1| that the rule leads to expect."""
    runtimes: list[RuntimeRouting]
    """What each runtime makes of it."""

    @property
    def misrouted(self) -> float:
        """Largest share of misrouted tokens of a runtime."""
        return max(routing.misrouted for routing in self.runtimes)

    @property
    def gate_deviation(self) -> float:
        """`RuntimeRouting.gate_deviation` of the worst runtime."""
        return max(routing.gate_deviation for routing in self.runtimes)


def router_exponent(logits_TE: Float[Tensor, "T E"]) -> int:
    """The p of a router: small enough for the runtime that resolves logits worst.

        p = round(log2(std(l)) + 10.7)

    Args:
        logits_TE: Router logits of calibration tokens, float32.

    Example:
        >>> router_exponent(2.5 * torch.randn(64, 16))
        12
    """
    std = typical_std(logits_TE)
    if std == 0:
        return 0
    exponent = round(math.log2(std) - LOG2_SCALED_STD)
    return min(max(exponent, SMALLEST_EXPONENT), LARGEST_EXPONENT)


def typical_std(logits_TE: Float[Tensor, "T E"]) -> float:
    """Standard deviation of the logits but for outlier tokens, a few of which would decide it.

    A token is one if its logits lie 8 times as far from 0 as those of the median token.
    """
    logits_TE = logits_TE.double()
    size_T = logits_TE.square().mean(dim=1)
    return float(logits_TE[size_T <= OUTLIER**2 * size_T.median()].std(correction=0))


def router_scale(
    x_TD: Float[Tensor, "T D"],
    router_ED: Float[Tensor, "E D"],
    active_experts: int,
    gating: Gating,
    dtype: torch.dtype,
) -> RouterScale:
    """Choose p for one layer, and see what every runtime makes of it.

    Args:
        x_TD: What the router sees on calibration tokens.
        router_ED: Router rows W_r.
        active_experts: k, 1 to E.
        gating: How the architecture weights the chosen experts.
        dtype: Of the exported weights.
    """
    logits_TE = router_logits(x_TD, router_ED)
    exponent = router_exponent(logits_TE)
    std = typical_std(logits_TE)
    slope = 0.5 if gating.score == "sigmoid" else 1.0
    return RouterScale(
        exponent=exponent,
        logit_std=std,
        expected_misrouted=_expected_misrouted(logits_TE, exponent, active_experts, gating),
        expected_gate_deviation=slope * std * 2.0**-exponent,
        runtimes=runtime_routing(x_TD, router_ED, exponent, active_experts, gating, dtype),
    )


def _expected_misrouted(
    logits_TE: Float[Tensor, "T E"], exponent: int, active_experts: int, gating: Gating
) -> float:
    """A quarter of what float32 scores resolve, in mean distances of the k-th logit from the next.

    Two logits closer than the resolution r get one score with probability 1 - distance / r, and of
    those ties every other one is broken wrongly. The distances of neighbours among many values are
    spread exponentially, so that r / (4 mean) tokens are concerned. r is 2^(p-22) for a sigmoid,
    whose values lie around 1/2, and 2^(p-23) for a softmax.
    """
    if active_experts == logits_TE.shape[1]:
        return 0.0
    largest = logits_TE.double().topk(active_experts + 1, dim=1).values
    distance = float((largest[:, -2] - largest[:, -1]).mean())
    resolution = 2.0 ** (exponent - (22 if gating.score == "sigmoid" else 23))
    return min(1.0, resolution / (4 * distance)) if distance > 0 else 0.0


def router_scales(
    dense: DenseModel,
    layout: ExpertLayout,
    tokens_BT: Tensor,
    gating: Gating,
    dtype: torch.dtype,
) -> list[RouterScale]:
    """`router_scale` of every split layer, on what its router sees in the masked model."""
    scales: dict[int, RouterScale] = {}

    def measure(layer: int, x_TD: Tensor) -> None:
        router_ED = layout.router_LED[layer].to(x_TD.device)
        scales[layer] = router_scale(x_TD, router_ED, layout.active_experts, gating, dtype)

    at_routers(dense, layout, tokens_BT, measure)
    return [scales[layer] for layer in layout.moe_layers]


def at_routers(
    dense: DenseModel,
    layout: ExpertLayout,
    tokens_BT: Tensor,
    look: Callable[[int, Tensor], None],
) -> None:
    """Run the masked model once; `look` is given each split layer and its router's input [T, D]."""

    def watch(index: int, layer: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def show(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            look(index, arguments[0].reshape(-1, arguments[0].shape[-1]))

        return layer.get_submodule("mlp").register_forward_pre_hook(show)

    with torch.no_grad(), masked_by(dense, layout):
        layers = dense.family.layers(dense.model)
        hooks = [watch(index, layers[index]) for index in layout.moe_layers]
        try:
            dense.family.trunk(dense.model)(input_ids=tokens_BT.to(dense.device), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()


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
