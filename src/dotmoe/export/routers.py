"""Routers of an export: the power of two that makes every gate 1, and what runtimes make of it.

Router rows times 2^-p give all experts the same weight but for `l 2^-p`, and keep their order; a
constant of the format makes that weight 1. p is bounded on both sides: gates deviate from 1 by
about `l 2^-p`, and most runtimes rank experts after a softmax or sigmoid in float32, where logits
closer than 2^(p-22) become ties. At std(l) 2^-p = 2^-10.7 both losses are small. Few runtimes are
at hand where a model is exported, so their routers are imitated here.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dotmoe.export.format import Gating
from dotmoe.layout import ExpertLayout
from dotmoe.models.family import TARGETS, DenseModel
from dotmoe.moe.masked import masked_by, watched
from dotmoe.moe.router import router_logits

LOG2_SCALED_STD = -10.7
"""Target of log2(std(logits) 2^-p)."""
SMALLEST_EXPONENT, LARGEST_EXPONENT = -16, 48
"""Outside, a router is degenerate; inside, 2^-p W_r stays normal in bfloat16 and float32."""
MISROUTED = 5e-2
"""Largest share of tokens that the scale may misroute in a runtime, beyond four standard errors of
the sample. 148 experts of random logits come to 0.4 %, a real model's first layer at k = E / 2,
where logits lie closest, to 4 %: near-ties. A scale that is wrong misroutes every tenth or more."""
GATE_DEVIATION = 2.0**-6
"""Largest deviation of a gate from 1; the common factor of a runtime's gates is 2^-5 from 1 at
most. Rounding of weights to bfloat16 is up to 2^-8, of their sum, in vLLM on a CPU, 2^-5.6."""
LOG2_RESOLVED = -20
"""Logits 2^(p - 20) apart get different scores in every runtime, whatever the error of its exp."""


class Runtime(NamedTuple):
    """What differs between the routers of runtimes."""

    name: str
    ranks_logits: bool = False
    """Experts are chosen by their logits, otherwise by their scores in float32."""
    logits_in_float32: bool = False
    rounds_weights: bool = False
    """To the dtype of the model."""
    rounds_sum: bool = False
    """The logarithm of the sum of exponentials, to the same."""


def runtimes_of(gating: Gating) -> list[Runtime]:
    """The runtimes of formats with such a gating, and how each routes."""
    own, casts = gating.score == "softmax_of_chosen", gating.casts
    if gating.only_in is not None:
        return [Runtime(gating.only_in, own, logits_in_float32=True)]
    if gating.score == "sigmoid":
        return [Runtime("all runtimes", logits_in_float32=True)]
    return [
        Runtime("Transformers", own, rounds_weights=casts),
        Runtime("vLLM on CUDA"),
        Runtime("SGLang", ranks_logits=True),
        Runtime("vLLM on a CPU", ranks_logits=True, rounds_weights=True, rounds_sum=True),
        Runtime("llama.cpp", logits_in_float32=True),
    ]


def route(
    runtime: Runtime,
    scaled_TE: Float[Tensor, "T E"],
    active_experts: int,
    gating: Gating,
    dtype: torch.dtype,
) -> tuple[Int[Tensor, "T K"], Float[Tensor, "T K"]]:
    """The experts that logits times 2^-p choose, and their weights without the constant."""
    scores_TE = scaled_TE.sigmoid() if gating.score == "sigmoid" else scaled_TE.softmax(dim=1)
    ranked_TE = scaled_TE if runtime.ranks_logits else scores_TE
    chosen_TK = ranked_TE.topk(active_experts, dim=1).indices
    weights_TK = scores_TE.gather(1, chosen_TK)
    if gating.renormalised:
        weights_TK = weights_TK / weights_TK.sum(dim=1, keepdim=True)
    elif runtime.rounds_sum:
        sum_T1 = scaled_TE.logsumexp(dim=1, keepdim=True).to(dtype).float()
        weights_TK = (scaled_TE.gather(1, chosen_TK) - sum_T1).to(dtype).float().exp()
    return chosen_TK, weights_TK.to(dtype).float() if runtime.rounds_weights else weights_TK


def misrouted_share(logits_TE: Float[Tensor, "T E"], chosen_TK: Int[Tensor, "T K"]) -> float:
    """Share of tokens that leave out an expert with a larger logit than one that they chose.

    Example:
        >>> misrouted_share(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([[0, 1]]))
        1.0
    """
    left_out_T = logits_TE.scatter(1, chosen_TK, -torch.inf).amax(dim=1)
    chosen_T = logits_TE.gather(1, chosen_TK).amin(dim=1)
    return float((left_out_T > chosen_T).double().mean())


def runtime_routing(
    x_TD: Float[Tensor, "T D"],
    router_ED: Float[Tensor, "E D"],
    exponent: int,
    active_experts: int,
    gating: Gating,
    dtype: torch.dtype,
) -> list[dict[str, Any]]:
    """What every runtime makes of a router that is written as 2^-p W_r, exact in the dtype.

    Returns:
        For each `runtime`: `misrouted`, the share of tokens that the scale sends to other experts
        than the runtime's own logits without it; `gain_error`, the median of gate - 1, a common
        factor of the block's output; `gate_deviation`, the 95th percentile over tokens of the
        largest |gate - 1| of a token, less |gain_error|. A gate is a chosen expert's weight times
        the constant.
    """
    x_TD, router_ED = x_TD.to(dtype), router_ED.to(dtype)
    constant = gating.constant(active_experts, len(router_ED))
    # 2^-p passes through every rounding, so scaling the logits is scaling the rows.
    float32_TE = router_logits(x_TD, router_ED)
    rounded_TE = (x_TD @ router_ED.T).float()
    rows = list[dict[str, Any]]()
    for runtime in runtimes_of(gating):
        logits_TE = float32_TE if runtime.logits_in_float32 else rounded_TE
        scaled_TE = logits_TE * 2.0**-exponent
        chosen_TK, weights_TK = route(runtime, scaled_TE, active_experts, gating, dtype)
        error_TK = constant * weights_TK.double() - 1
        gain = float(error_TK.median())
        deviation = float(error_TK.abs().amax(dim=1).quantile(0.95))
        row = {"runtime": runtime.name, "misrouted": misrouted_share(logits_TE, chosen_TK)}
        rows.append(row | {"gate_deviation": max(0.0, deviation - abs(gain)), "gain_error": gain})
    return rows


def outliers_in(logits_TE: Float[Tensor, "T E"]) -> Bool[Tensor, " T"]:
    """Which tokens have logits more than 8 times as far from 0 as those of the median token."""
    size_T = logits_TE.double().square().mean(dim=1)
    return size_T > 8**2 * size_T.median()


def router_exponent(logits_TE: Float[Tensor, "T E"]) -> int:
    """The p of a router, round(log2(std(l)) + 10.7), from the router logits of calibration tokens.

    Example:
        >>> router_exponent(2.5 * torch.randn(64, 16))
        12
    """
    # Without outlier tokens, a few of which would decide it.
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
    """The scale of every split layer's router, from what it sees in the masked model on real text.

    `dense` can run, in float32; the router entries of `layout` are exact in `dtype`, that of the
    exported weights.

    Returns:
        For each `layer`: `exponent`, p; `first_token_is_tied`, whether runtimes may route the first
        token of every text differently; `runtimes`, of `runtime_routing`.
    """
    first: dict[int, Tensor] = {}
    scales: list[dict[str, Any]] = []

    def measure(layer: int, x_TD: Tensor) -> None:
        router_ED, k = layout.router_LED[layer].to(x_TD.device), layout.active_experts
        p, is_tied = gating.exponent, False
        if p is None:
            p = router_exponent(router_logits(x_TD, router_ED))
            if layer in first and k < layout.num_experts:
                top = router_logits(first[layer], router_ED)[0].topk(k + 1).values
                is_tied = 0 < float(top[-2] - top[-1]) < 2.0 ** (p + LOG2_RESOLVED)
        runtimes = runtime_routing(x_TD, router_ED, p, k, gating, dtype)
        scale = {"layer": layer, "exponent": p, "first_token_is_tied": is_tied}
        scales.append(scale | {"runtimes": runtimes})

    bos = dense.tokenizer.bos_token_id
    if bos is not None:
        at_routers(dense, layout, torch.tensor([[bos]]), first.__setitem__)
    at_routers(dense, layout, tokens_BT, measure)
    return scales


def at_routers(
    dense: DenseModel,
    layout: ExpertLayout,
    tokens_BT: Int[Tensor, "B T"],
    look: Callable[[int, Tensor], None],
    target: str = "ffn",
) -> None:
    """Run the masked model once; `look` is given each split layer and its router's input [T, D]."""
    layers = dense.family.layers(dense.model)
    with torch.no_grad(), masked_by(dense, layout):
        blocks = {layer: TARGETS[target].block(layers[layer]) for layer in layout.moe_layers}
        with watched(blocks, lambda layer, x: look(layer, x.flatten(0, -2))):
            dense.family.trunk(dense.model)(input_ids=tokens_BT.to(dense.device), use_cache=False)


def largest_share(expected: float, num_tokens: int) -> float:
    """What a share of so many tokens may come to by chance: four standard errors above."""
    return expected + 4 * float((expected / num_tokens) ** 0.5)


def beyond(figures: Iterable[tuple[str, float, float]]) -> list[str]:
    """Name, value and limit of each figure beyond its limit; NaN is beyond every one."""
    return [
        f"{what} is {value:.3g}, limit {limit:.3g}."
        for what, value, limit in figures
        if not value <= limit
    ]


def routing_problems(scales: Sequence[Mapping[str, Any]], num_tokens: int) -> list[str]:
    """What some runtime could not follow: layer, runtime, figure, limit and remedy, a line each."""
    limits = {
        "misrouted": ("share of misrouted tokens", largest_share(MISROUTED, num_tokens)),
        "gate_deviation": ("95th percentile of the deviation of a gate from 1", GATE_DEVIATION),
        "gain_error": ("common factor of the gates, less 1,", 2 * GATE_DEVIATION),
    }
    figures = [
        (f"layer {scale['layer']} in {row['runtime']}: {what}", abs(row[key]), limit)
        for scale in scales
        for row in scale["runtimes"]
        for key, (what, limit) in limits.items()
    ]
    remedy = "Choose another export format or expert size, or align for longer."
    return [f"{problem} {remedy}" for problem in beyond(figures)]


def routing_notes(scales: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a user must know of the first token, if it is tied."""
    tied = ", ".join(str(scale["layer"]) for scale in scales if scale["first_token_is_tied"])
    note = (
        f"The first token of every text is at a near-tie in layer {tied}: runtimes may send it to "
        "different experts, and then perplexity and texts differ between them."
    )
    return [note] if tied else []
