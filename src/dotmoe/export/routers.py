"""Routers of an export: the power of two that makes every gate 1, and what runtimes make of it.

A served MoE weights its experts by a function of their logits. Router rows times 2^-p give all
experts the same weight but for `l 2^-p`, and keep their order; a constant of the format makes that
weight 1. p is bounded on both sides: gates deviate from 1 by about `l 2^-p`, and most runtimes rank
experts after a softmax or sigmoid in float32, where logits closer than 2^(p-22) become ties. At
std(l) 2^-p = 2^-10.7 both losses are small.

Runtimes differ in the dtype of their logits, in what they rank, in their exp, and in what they
round. Where a model is exported few of them are at hand, so their routers are imitated here.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dotmoe.export.format import Gating
from dotmoe.layout import ExpertLayout
from dotmoe.models.dense import DenseModel
from dotmoe.moe.masked import masked_by
from dotmoe.moe.router import router_logits

LOG2_SCALED_STD = -10.7
"""Target of log2(std(logits) 2^-p)."""
SMALLEST_EXPONENT, LARGEST_EXPONENT = -16, 48
"""Outside, a router is degenerate; inside, 2^-p W_r stays normal in bfloat16 and float32."""
OUTLIER = 8.0
"""Logits of an outlier token are that many times those of the median token."""
TYPICAL = 0.95
"""Quantile over tokens at which gates are judged."""
MISROUTED = 5e-2
"""Largest share of tokens that the scale may misroute in a runtime, beyond four standard errors of
the sample. 148 experts of random logits come to 0.4 %, a real model's first layer at k = E / 2,
where logits lie closest, to 4 %: near-ties. A scale that is wrong misroutes every tenth or more."""
GATE_DEVIATION = 2.0**-6
"""Largest `RuntimeRouting.gate_deviation`; beside it, the runtime's common factor is 2^-5 from 1 at
most. Rounding of weights to bfloat16 is up to 2^-8, of their sum, in vLLM on a CPU, 2^-5.6."""
LOG2_RESOLVED = -20
"""Logits 2^(p - 20) apart get different scores in every runtime, whatever the error of its exp."""
EXP_ERROR = 2
"""Largest error of another machine's float32 exp, in units of the last place."""


# --- the routers of the runtimes --------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeRouter:
    """How a group of runtimes routes."""

    runtime: str
    """Their names."""
    scores: Callable[[Float[Tensor, "T E"]], Float[Tensor, "T E"]]
    """Weights of all experts, before any division by the sum over the chosen."""
    ranks_logits: bool = False
    """Experts are chosen by their logits, otherwise by their scores in float32."""
    rounds_logits: bool = False
    """The router is multiplied in the dtype of the model, otherwise in float32."""
    rounds_weights: bool = False
    """Weights are rounded to the dtype of the model."""
    rounds_sum: bool = False
    """The logarithm of the sum of exponentials is rounded to the dtype of the model, too."""


def runtime_routers(gating: Gating) -> list[RuntimeRouter]:
    """The routers of the runtimes for formats with such a gating."""
    rounded = gating.logits_in_model_dtype
    if gating.only_in is not None:
        ranks_logits = gating.score == "softmax_of_chosen"
        scores = _softmax if ranks_logits else _other_softmax
        return [RuntimeRouter(runtime=gating.only_in, scores=scores, ranks_logits=ranks_logits)]
    stock = RuntimeRouter(
        runtime="Transformers",
        scores=torch.sigmoid if gating.score == "sigmoid" else _softmax,
        ranks_logits=gating.score == "softmax_of_chosen",
        rounds_logits=rounded,
        rounds_weights=gating.cast_to_model_dtype,
    )
    if gating.score == "sigmoid":
        others = "SGLang, llama.cpp"
        return [
            stock,
            RuntimeRouter(runtime="vLLM", scores=_sigmoid_by_tanh, rounds_logits=rounded),
            RuntimeRouter(runtime=others, scores=_other_sigmoid, rounds_logits=rounded),
        ]
    return [
        stock,
        RuntimeRouter(runtime="vLLM on CUDA", scores=_other_softmax, rounds_logits=rounded),
        RuntimeRouter(runtime="SGLang", scores=_softmax, ranks_logits=True, rounds_logits=rounded),
        RuntimeRouter(
            runtime="vLLM on a CPU",
            scores=_softmax,
            ranks_logits=True,
            rounds_logits=rounded,
            rounds_weights=rounded,
            rounds_sum=rounded,
        ),
        RuntimeRouter(runtime="llama.cpp", scores=_other_softmax),
    ]


def route(
    router: RuntimeRouter,
    scaled_TE: Float[Tensor, "T E"],
    active_experts: int,
    gating: Gating,
    dtype: torch.dtype,
) -> tuple[Int[Tensor, "T K"], Float[Tensor, "T K"]]:
    """The chosen experts and their weights, without the format's constant.

    Args:
        router: Whose.
        scaled_TE: Logits times 2^-p, float32.
        active_experts: k, 1 to E.
        gating: Whether weights are divided by their sum.
        dtype: Of the model; weights and sums may be rounded to it.
    """
    scores_TE = router.scores(scaled_TE)
    ranked_TE = scaled_TE if router.ranks_logits else scores_TE
    chosen_TK = ranked_TE.topk(active_experts, dim=1).indices
    weights_TK = scores_TE.gather(1, chosen_TK)
    if gating.renormalised:
        weights_TK = weights_TK / weights_TK.sum(dim=1, keepdim=True)
    elif router.rounds_sum:
        sum_T1 = torch.logsumexp(scaled_TE, dim=1, keepdim=True).to(dtype).float()
        weights_TK = (scaled_TE.gather(1, chosen_TK) - sum_T1).to(dtype).float().exp()
    if router.rounds_weights:
        weights_TK = weights_TK.to(dtype).float()
    return chosen_TK, weights_TK


def shortfall(
    logits_TE: Float[Tensor, "T E"], chosen_TK: Int[Tensor, "T K"]
) -> Float[Tensor, " T"]:
    """How far the best expert left out lies above the worst one chosen; 0 or less: a right choice.

    Unlike a comparison of sets it does not count the two outcomes of an exact tie as different.

    Example:
        >>> shortfall(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([[0, 1]]))
        tensor([1.])
    """
    left_out = logits_TE.scatter(1, chosen_TK, -torch.inf).amax(dim=1)
    return left_out - logits_TE.gather(1, chosen_TK).amin(dim=1)


def other_exp(x: Tensor) -> Tensor:
    """A float32 exp that is up to `EXP_ERROR` units in the last place beside torch's.

    How far is a fixed function of the argument's bits, as it is in a library: equal arguments stay
    equal.
    """
    # An odd multiplier spreads neighbouring bit patterns (Fibonacci hashing).
    mixed = (x.contiguous().view(torch.int32).long() * 2654435761 >> 13) & 0x7FFF
    places = mixed % (2 * EXP_ERROR + 1) - EXP_ERROR
    exact = torch.exp(x)
    return (exact.view(torch.int32) + places.int()).view(torch.float32)


def _softmax(x_TE: Tensor) -> Tensor:
    return torch.softmax(x_TE, dim=1)


def _other_softmax(x_TE: Tensor) -> Tensor:
    powers_TE = other_exp(x_TE - x_TE.amax(dim=1, keepdim=True))
    return powers_TE / powers_TE.sum(dim=1, keepdim=True)


def _other_sigmoid(x_TE: Tensor) -> Tensor:
    return 1 / (1 + other_exp(-x_TE))


def _sigmoid_by_tanh(x_TE: Tensor) -> Tensor:
    return 0.5 * torch.tanh(0.5 * x_TE) + 0.5


# --- what they make of a scaled router --------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeRouting:
    """What a group of runtimes makes of one layer's router, on the calibration tokens."""

    runtime: str
    """Their names."""
    misrouted: float
    """Share of tokens that the scale sends to other experts: an expert left out has a larger logit,
    as the runtime computes it without the scale, than one chosen."""
    tied: float
    """Share for which the k-th and the next logit are equal, so that either choice is right."""
    gate_deviation: float
    """95th percentile over tokens of the largest |gate - 1| of a token, less |gain_error|. A gate
    is the weight of a chosen expert times the constant that the export sets against it."""
    largest_gate_deviation: float
    """Largest |gate - 1| of all tokens, outliers included."""
    gain_error: float
    """Median of gate - 1: a common factor of the block's output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterScale:
    """How one layer's router is scaled, and what that costs on the calibration tokens."""

    layer: int
    """Number of the layer in the model."""
    exponent: int
    """p: the router is written as 2^-p W_r."""
    logit_std: float
    """`typical_std` of the unscaled logits."""
    outliers: float
    """Share of outlier tokens, whose logits are 8 times those of the median token."""
    first_token_is_tied: bool
    """Some runtime may send the first token of every text to other experts, and a p that tells them
    apart would spoil the gates."""
    runtimes: list[RuntimeRouting]
    """What each runtime makes of it."""


def outliers_in(logits_TE: Float[Tensor, "T E"]) -> Bool[Tensor, " T"]:
    """Which tokens have logits more than 8 times as far from 0 as those of the median token.

    Language models have such tokens, the first of a text above all.
    """
    size_T = logits_TE.double().square().mean(dim=1)
    return size_T > OUTLIER**2 * size_T.median()


def typical_std(logits_TE: Float[Tensor, "T E"]) -> float:
    """Standard deviation of the logits but for outlier tokens, a few of which would decide it."""
    return float(logits_TE[~outliers_in(logits_TE)].double().std(correction=0))


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


def scale_routers(
    dense: DenseModel,
    layout: ExpertLayout,
    tokens_BT: Int[Tensor, "B T"],
    gating: Gating,
    dtype: torch.dtype,
    exponent: int | None = None,
) -> list[RouterScale]:
    """The scale of every split layer's router, from what it sees in the masked model.

    The first token of every text, where the tokenizer puts one, is looked at by itself: all later
    tokens attend to it, so a tie there spoils a whole text. p is lowered by one where that resolves
    it and gates allow; each step doubles their error.

    Args:
        dense: A dense model that can run, in float32.
        layout: Experts and routers; router entries exact in `dtype`.
        tokens_BT: Real text.
        gating: How the format weights experts.
        dtype: Of the exported weights.
        exponent: The format's own p; None: chosen by layer.
    """
    first: dict[int, Tensor] = {}
    scales: list[RouterScale] = []

    def measure(layer: int, x_TD: Tensor) -> None:
        router_ED, k = layout.router_LED[layer].to(x_TD.device), layout.active_experts
        logits_TE = router_logits(x_TD, router_ED)
        p = start = router_exponent(logits_TE) if exponent is None else exponent
        if exponent is None and layer in first:
            p = min(start, _resolving_exponent(first[layer], router_ED, k, gating, dtype))
        rows = runtime_routing(x_TD, router_ED, p, k, gating, dtype)
        worst = max(max(row.gate_deviation, abs(row.gain_error) / 2) for row in rows)
        is_tied = p < start - 1 or (p < start and worst > GATE_DEVIATION)
        if is_tied:
            p, rows = start, runtime_routing(x_TD, router_ED, start, k, gating, dtype)
        scales.append(
            RouterScale(
                layer=layer,
                exponent=p,
                logit_std=typical_std(logits_TE),
                outliers=_share(outliers_in(logits_TE)),
                first_token_is_tied=is_tied,
                runtimes=rows,
            )
        )

    bos = dense.tokenizer.bos_token_id
    if bos is not None:
        at_routers(dense, layout, torch.tensor([[bos]]), first.__setitem__)
    at_routers(dense, layout, tokens_BT, measure)
    return scales


def _resolving_exponent(
    x_1D: Tensor, router_ED: Tensor, active_experts: int, gating: Gating, dtype: torch.dtype
) -> int:
    """The largest p at which every runtime tells the k-th logit of one token from the next."""
    if active_experts == len(router_ED):
        return LARGEST_EXPONENT
    if gating.logits_in_model_dtype:
        logits_1E = (x_1D.to(dtype) @ router_ED.to(dtype).T).float()
    else:
        logits_1E = router_logits(x_1D, router_ED)
    largest = logits_1E[0].topk(active_experts + 1).values
    gap = float(largest[-2] - largest[-1])
    if gap == 0:  # a tie without the scale, too
        return LARGEST_EXPONENT
    return math.floor(math.log2(gap)) - LOG2_RESOLVED


def runtime_routing(
    x_TD: Float[Tensor, "T D"],
    router_ED: Float[Tensor, "E D"],
    exponent: int,
    active_experts: int,
    gating: Gating,
    dtype: torch.dtype,
) -> list[RuntimeRouting]:
    """What every runtime makes of a router that is written as 2^-p W_r.

    Args:
        x_TD: Inputs of the router, in any dtype; rounded to that of the model, as they will be.
        router_ED: Router rows W_r, exact in the dtype of the model.
        exponent: p.
        active_experts: k, 1 to E.
        gating: How the format weights the chosen experts.
        dtype: Of the exported weights.
    """
    x_TD, router_ED = x_TD.to(dtype), router_ED.to(dtype)
    # 2^-p passes through every rounding, so scaling the logits is scaling the rows.
    rounded_TE = (x_TD @ router_ED.T).float()
    float32_TE = router_logits(x_TD, router_ED)
    rows = []
    for router in runtime_routers(gating):
        logits_TE = rounded_TE if router.rounds_logits else float32_TE
        scaled_TE = logits_TE * 2.0**-exponent
        chosen_TK, weights_TK = route(router, scaled_TE, active_experts, gating, dtype)
        unscaled_TK = logits_TE.topk(active_experts, dim=1).indices
        gates_TK = gating.constant * weights_TK.double()
        gain = float((gates_TK - 1).median())
        deviation_T = (gates_TK - 1).abs().amax(dim=1)
        rows.append(
            RuntimeRouting(
                runtime=router.runtime,
                misrouted=_share(shortfall(logits_TE, chosen_TK) > 0),
                tied=_share(shortfall(logits_TE, unscaled_TK) == 0),
                gate_deviation=max(0.0, float(deviation_T.quantile(TYPICAL)) - abs(gain)),
                largest_gate_deviation=float(deviation_T.max()),
                gain_error=gain,
            )
        )
    return rows


def at_routers(
    dense: DenseModel,
    layout: ExpertLayout,
    tokens_BT: Int[Tensor, "B T"],
    look: Callable[[int, Tensor], None],
) -> None:
    """Run the masked model once; `look` is given each split layer and its router's input [T, D]."""

    def shows(index: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda module, arguments: look(index, arguments[0].flatten(0, -2))

    with torch.no_grad(), masked_by(dense, layout), ExitStack() as hooks:
        layers = dense.family.layers(dense.model)
        for index in layout.moe_layers:
            block = layers[index].get_submodule("mlp")
            hooks.enter_context(block.register_forward_pre_hook(shows(index)))
        dense.family.trunk(dense.model)(input_ids=tokens_BT.to(dense.device), use_cache=False)


def _share(holds_T: Tensor) -> float:
    return float(holds_T.double().mean())


# --- limits and notes -------------------------------------------------------------------------


def largest_share(expected: float, num_tokens: int) -> float:
    """Largest share of a sample of tokens that may be met by chance: four standard errors above."""
    return expected + 4 * float((expected / num_tokens) ** 0.5)


def routing_problems(scales: list[RouterScale], num_tokens: int) -> list[str]:
    """What some runtime could not follow: layer, runtime, figure, limit and remedy, a line each."""
    problems = []
    misrouted = largest_share(MISROUTED, num_tokens)
    for scale in scales:
        for row in scale.runtimes:
            limits = {
                "share of misrouted tokens": (row.misrouted, misrouted),
                "95th percentile of the deviation of a gate from 1": (
                    row.gate_deviation,
                    GATE_DEVIATION,
                ),
                "common factor of the gates, less 1,": (abs(row.gain_error), 2 * GATE_DEVIATION),
            }
            problems += [
                f"layer {scale.layer} in {row.runtime}: {what} is {value:.3g}, limit {limit:.3g}. "
                "Choose another export format or expert size, or align for longer."
                for what, (value, limit) in limits.items()
                if not value <= limit  # so that NaN fails too
            ]
    return problems


def routing_notes(scales: list[RouterScale]) -> list[str]:
    """What a user must know of the first token, if it is tied."""
    tied = [str(scale.layer) for scale in scales if scale.first_token_is_tied]
    if not tied:
        return []
    return [
        f"The first token of every text is at a near-tie in layer {', '.join(tied)}, so that "
        "runtimes may send it to different experts. All later tokens attend to it: perplexity and "
        "texts can differ between runtimes. Another seed or another number of experts avoids it."
    ]
