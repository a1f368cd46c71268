"""The routers of the runtimes in plain torch: which experts each chooses, and with what weights.

Runtimes differ in the dtype of their logits, in what they rank (the logits, or a softmax or sigmoid
of them in float32), in their exp, and in whether they round the weights. Where a model is exported
few of them are at hand, and a scale that one of them bears may break the routing of another.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dotmoe.export.gating import Gating
from dotmoe.moe.router import router_logits

EXP_ERROR = 2
"""Largest error of another machine's float32 exp, in units of the last place."""

TYPICAL = 0.95
"""Quantile over tokens at which gates are judged; the outlier tokens lie beyond."""

Scores = Callable[[Float[Tensor, "T E"]], Float[Tensor, "T E"]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeRouter:
    """How a group of runtimes routes."""

    runtime: str
    """Their names."""
    scores: Scores
    """Weights of all experts, before any division by the sum over the chosen."""
    ranks_logits: bool = False
    """Experts are chosen by their logits, otherwise by their scores in float32."""
    rounds_logits: bool = False
    """The router is multiplied in the dtype of the model, otherwise in float32."""
    rounds_weights: bool = False
    """Weights are rounded to the dtype of the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeRouting:
    """What a group of runtimes makes of one layer's router, on the calibration tokens."""

    runtime: str
    """Their names."""
    misrouted: float
    """Share of tokens that the scale sends to other experts: an expert left out has a larger logit,
    as the runtime computes it without the scale, than one chosen."""
    misrouted_by_dtype: float
    """Share that goes to other experts than the exact logits say already without the scale, since
    the runtime's logits are rounded."""
    tied: float
    """Share for which the k-th and the next logit are equal, so that either choice is right."""
    gate_deviation: float
    """95th percentile over tokens of the largest |gate - 1| of a token. A gate is the weight of a
    chosen expert times the constant that the export sets against it."""
    largest_gate_deviation: float
    """The same of the worst token. Language models have outlier tokens, the first of a text above
    all, whose logits lie far outside the others."""
    gain_error: float
    """Mean of gate - 1: a common factor of the block's output."""


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
        gating: How the architecture weights the chosen experts.
        dtype: Of the exported weights.
    """
    x_TD, router_ED = x_TD.to(dtype), router_ED.to(dtype)
    exact_TE = x_TD.double() @ router_ED.double().T
    # 2^-p passes through every rounding, so scaling the logits is scaling the rows.
    rounded_TE = (x_TD @ router_ED.T).float()
    float32_TE = router_logits(x_TD, router_ED)
    rows = []
    for router in runtime_routers(gating):
        logits_TE = rounded_TE if router.rounds_logits else float32_TE
        chosen_TK, weights_TK = route(
            router, logits_TE * 2.0**-exponent, active_experts, gating, dtype
        )
        unscaled_TK = logits_TE.topk(active_experts, dim=1).indices
        gates_TK = gating.constant * weights_TK.double()
        deviation_T = (gates_TK - 1).abs().amax(dim=1)
        rows.append(
            RuntimeRouting(
                runtime=router.runtime,
                misrouted=_share(shortfall(logits_TE, chosen_TK) > 0),
                misrouted_by_dtype=_share(shortfall(exact_TE, unscaled_TK) > 0),
                tied=_share(shortfall(logits_TE, unscaled_TK) == 0),
                gate_deviation=float(deviation_T.quantile(TYPICAL)),
                largest_gate_deviation=float(deviation_T.max()),
                gain_error=float((gates_TK - 1).mean()),
            )
        )
    return rows


def runtime_routers(gating: Gating) -> list[RuntimeRouter]:
    """The routers of the runtimes for architectures with such a gating."""
    rounded = gating.logits_in_model_dtype
    if gating.score == "sigmoid":
        return [
            RuntimeRouter(
                runtime="Transformers",
                scores=torch.sigmoid,
                rounds_logits=rounded,
                rounds_weights=gating.cast_to_model_dtype,
            ),
            RuntimeRouter(runtime="vLLM", scores=_sigmoid_by_tanh, rounds_logits=rounded),
            RuntimeRouter(
                runtime="SGLang, llama.cpp", scores=_other_sigmoid, rounds_logits=rounded
            ),
        ]
    return [
        RuntimeRouter(
            runtime="Transformers",
            scores=_softmax,
            ranks_logits=gating.score == "softmax_of_chosen",
            rounds_logits=rounded,
            rounds_weights=gating.cast_to_model_dtype,
        ),
        RuntimeRouter(runtime="vLLM on CUDA", scores=_other_softmax, rounds_logits=rounded),
        RuntimeRouter(
            runtime="SGLang, vLLM on CPU",
            scores=_softmax,
            ranks_logits=True,
            rounds_logits=rounded,
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
    """The chosen experts and their weights, without the architecture's constant.

    Args:
        router: Whose.
        scaled_TE: Logits times 2^-p, float32.
        active_experts: k, 1 to E.
        gating: Whether weights are divided by their sum.
        dtype: Of the model; the weights may be rounded to it.
    """
    scores_TE = router.scores(scaled_TE)
    ranked_TE = scaled_TE if router.ranks_logits else scores_TE
    chosen_TK = ranked_TE.topk(active_experts, dim=1).indices
    weights_TK = scores_TE.gather(1, chosen_TK)
    if gating.renormalised:
        weights_TK = weights_TK / weights_TK.sum(dim=1, keepdim=True)
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


def _share(holds_T: Tensor) -> float:
    return float(holds_T.double().mean())
