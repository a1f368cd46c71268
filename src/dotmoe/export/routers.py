"""Router scales of an export: the power of two that makes every gate 1, and its effects.

Router rows times 2^-p give all experts nearly the same weight, up to about `l 2^-p` for logits l,
and keep their order; a constant of the format makes that weight 1. p is bounded on both sides:
gates deviate from 1 by about `l 2^-p`, and most runtimes rank experts after a softmax or sigmoid in
float32, where logits closer than 2^(p-22) become ties. At std(l) 2^-p = 2^-10.7 both errors are
small. Few runtimes are installed where a model is exported, so their routing is imitated here.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dotmoe.export.format import Gating
from dotmoe.method.layout import ExpertLayout, Layouts
from dotmoe.method.masked import masked_by
from dotmoe.method.router import router_logits
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.hooks import input_hooks
from dotmoe.models.scoring import hidden_states
from dotmoe.models.targets import TARGETS

LOG2_SCALED_STD = -10.7
"""Target of log2(std(logits) 2^-p)."""
SMALLEST_EXPONENT, LARGEST_EXPONENT = -16, 48
"""Range of p: outside, a router is degenerate; inside, 2^-p W_r is normal in bfloat16, float32."""
MISROUTED = 5e-2
"""Largest share of tokens that the scale may misroute in a runtime, plus four standard errors of
the sample. Near-ties misroute 0.4 % with 148 experts of random logits, and 4 % in a real model's
first layer at k = E / 2, where logits are closest. A wrong scale misroutes a tenth or more."""
GATE_DEVIATION = 2.0**-6
"""Largest deviation of a gate from 1; the common factor of a runtime's gates may deviate by 2^-5.
Rounding weights to bfloat16 adds up to 2^-8."""


class RouterRuntime(NamedTuple):
    """The properties in which the routers of runtimes differ."""

    name: str
    ranks_logits: bool = False
    """Whether experts are chosen by their logits; otherwise by their scores in float32."""
    logits_in_float32: bool = False
    rounds_weights: bool = False
    """Whether expert weights are rounded to the dtype of the model."""
    factors_in_float16: bool = False
    """Whether inputs and router rows are rounded to float16 before they are multiplied: small rows
    lose digits there, and become zero below 2^-25."""


def runtimes_of(gating: Gating) -> list[RouterRuntime]:
    """The runtimes of formats with this gating, and how each one routes."""
    own, casts = gating.score == "softmax_of_chosen", gating.casts
    if gating.only_in is not None:
        return [
            RouterRuntime(gating.only_in, own, logits_in_float32=True),
            RouterRuntime(f"{gating.only_in} on Metal and Vulkan", own, factors_in_float16=True),
        ]
    if gating.score == "sigmoid":
        return [RouterRuntime("all runtimes", logits_in_float32=True)]
    return [
        RouterRuntime("Transformers", own, rounds_weights=casts),
        RouterRuntime("vLLM on CUDA"),
        RouterRuntime("SGLang", ranks_logits=True),
        RouterRuntime("vLLM on a CPU", ranks_logits=True, rounds_weights=True),
        RouterRuntime("llama.cpp", logits_in_float32=True),
    ]


def route(
    runtime: RouterRuntime,
    scaled_TE: Float[Tensor, "T E"],
    active_experts: int,
    gating: Gating,
    dtype: torch.dtype,
) -> tuple[Int[Tensor, "T K"], Float[Tensor, "T K"]]:
    """Imitate a runtime: the experts that scaled logits choose, and weights before the constant."""
    scores_TE = scaled_TE.sigmoid() if gating.score == "sigmoid" else scaled_TE.softmax(dim=1)
    ranked_TE = scaled_TE if runtime.ranks_logits else scores_TE
    chosen_TK = ranked_TE.topk(active_experts, dim=1).indices
    weights_TK = scores_TE.gather(1, chosen_TK)
    if gating.score != "sigmoid":
        weights_TK = weights_TK / weights_TK.sum(dim=1, keepdim=True)
    if runtime.rounds_weights:
        weights_TK = weights_TK.to(dtype).float()
    return chosen_TK, weights_TK


def misrouted_share(logits_TE: Float[Tensor, "T E"], chosen_TK: Int[Tensor, "T K"]) -> float:
    """Share of tokens for which a left-out expert has a larger logit than a chosen one.

    Example:
        >>> misrouted_share(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([[0, 1]]))
        1.0
    """
    left_out_T = logits_TE.scatter(1, chosen_TK, -torch.inf).amax(dim=1)
    return float((left_out_T > logits_TE.gather(1, chosen_TK).amin(dim=1)).double().mean())


def runtime_routing(
    x_TD: Float[Tensor, "T D"],
    router_ED: Float[Tensor, "E D"],
    exponent: int,
    active_experts: int,
    gating: Gating,
    dtype: torch.dtype,
) -> list[dict[str, Any]]:
    """Routing errors in every runtime of a router written as 2^-p W_r, exact in the dtype.

    Returns:
        For each `runtime`: `misrouted`, the share of tokens that the scale sends to other experts
        than the runtime's unscaled logits would; `gain_error`, the median of gate - 1, a common
        factor of the block's output; `gate_deviation`, the 95th percentile over tokens of the
        largest |gate - 1| of a token, minus |gain_error|. A gate is a chosen expert's weight times
        the constant.
    """
    x_TD, router_ED = x_TD.to(dtype), router_ED.to(dtype)
    constant = gating.constant(active_experts)
    rows = list[dict[str, Any]]()
    for runtime in runtimes_of(gating):
        logits_TE = _logits_in(runtime, x_TD, router_ED)
        if runtime.factors_in_float16:
            scaled_TE = _logits_in(runtime, x_TD, router_ED.float() * 2.0**-exponent)
        else:
            # Multiplying by 2^-p commutes with rounding, so this equals scaling the rows.
            scaled_TE = logits_TE * 2.0**-exponent
        chosen_TK, weights_TK = route(runtime, scaled_TE, active_experts, gating, dtype)
        error_TK = constant * weights_TK.double() - 1
        gain = float(error_TK.median())
        deviation = float(error_TK.abs().amax(dim=1).quantile(0.95))
        row = {"runtime": runtime.name, "misrouted": misrouted_share(logits_TE, chosen_TK)}
        rows.append(row | {"gate_deviation": max(0.0, deviation - abs(gain)), "gain_error": gain})
    return rows


def _logits_in(
    runtime: RouterRuntime, x_TD: Float[Tensor, "T D"], router_ED: Float[Tensor, "E D"]
) -> Float[Tensor, "T E"]:
    """Router logits as a runtime computes them, as float32 numbers."""
    if runtime.logits_in_float32:
        return router_logits(x_TD, router_ED)
    if runtime.factors_in_float16:
        return router_logits(x_TD.half(), router_ED.half())
    return (x_TD @ router_ED.T).float()


def outliers_in(logits_TE: Float[Tensor, "T E"]) -> Bool[Tensor, " T"]:
    """Mask of tokens whose logits have more than 8 times the RMS of the median token's."""
    size_T = logits_TE.double().square().mean(dim=1)
    return size_T > 8**2 * size_T.median()


def router_exponent(logits_TE: Float[Tensor, "T E"]) -> int:
    """The p of a router, round(log2(std(l)) + 10.7), from the router logits of calibration tokens.

    Example:
        >>> router_exponent(2.5 * torch.randn(64, 16))
        12
    """
    # Without outlier tokens, because a few of them would determine the result.
    std = float(logits_TE[~outliers_in(logits_TE)].double().std(correction=0))
    exponent = round(math.log2(std) - LOG2_SCALED_STD) if std else 0
    return min(max(exponent, SMALLEST_EXPONENT), LARGEST_EXPONENT)


def scale_routers(
    dense: DenseModel,
    layout: ExpertLayout,
    tokens_BT: Int[Tensor, "B T"],
    gating: Gating,
    dtype: torch.dtype,
) -> list[dict[str, Any]]:
    """Scale of every split layer's router, from its inputs in the masked model on real text.

    `dense` must be able to run in float32; the router entries of `layout` must be exact in `dtype`,
    the dtype of the exported weights.

    Returns:
        For each `layer`: `exponent`, p; `runtimes`, the result of `runtime_routing`.
    """
    scales: list[dict[str, Any]] = []

    def measure(layer: int, x_TD: Tensor) -> None:
        router_ED = layout.router_LED[layer].to(x_TD.device)
        p = router_exponent(router_logits(x_TD, router_ED))
        runtimes = runtime_routing(x_TD, router_ED, p, layout.active_experts, gating, dtype)
        scales.append({"layer": layer, "exponent": p, "runtimes": runtimes})

    at_routers(dense, (layout,), tokens_BT, measure)
    return scales


def at_routers(
    dense: DenseModel,
    layouts: Layouts,
    tokens_BT: Int[Tensor, "B T"],
    look: Callable[[int, Tensor], None],
    target: str = "ffn",
) -> None:
    """Run the masked model once; `look` is given each split layer and its router's input [T, D]."""
    family, part = dense.family, TARGETS[target]
    layers = family.layers(dense.model)
    with torch.no_grad(), masked_by(dense, *layouts):
        blocks = {n: family.block(layers[n], part) for n in layouts[0].moe_layers}
        with input_hooks(blocks, lambda layer, x: look(layer, x.flatten(0, -2))):
            hidden_states(dense.model, tokens_BT)


def largest_share(expected: float, num_tokens: int) -> float:
    """Largest share that chance explains in `num_tokens`: `expected` plus four standard errors."""
    return expected + 4 * float((expected / num_tokens) ** 0.5)


def exceeded_limits(metrics: Iterable[tuple[str, float, float]]) -> list[str]:
    """Name, value and limit of each metric above its limit; NaN is above every limit."""
    return [
        f"{what} is {value:.3g}, limit {limit:.3g}."
        for what, value, limit in metrics
        if not value <= limit
    ]


def routing_problems(scales: Sequence[Mapping[str, Any]], num_tokens: int) -> list[str]:
    """A sentence for each exceeded limit: layer, runtime, metric, value, limit and remedy."""
    limits = {
        "misrouted": ("share of misrouted tokens", largest_share(MISROUTED, num_tokens)),
        "gate_deviation": ("95th percentile of the deviation of a gate from 1", GATE_DEVIATION),
        "gain_error": ("common factor of the gates, less 1,", 2 * GATE_DEVIATION),
    }
    metrics = [
        (f"layer {scale['layer']} in {row['runtime']}: {what}", abs(row[key]), limit)
        for scale in scales
        for row in scale["runtimes"]
        for key, (what, limit) in limits.items()
    ]
    remedy = "Choose another export format or expert size, or align for longer."
    return [f"{problem} {remedy}" for problem in exceeded_limits(metrics)]
