"""What llama.cpp's router makes of a layout: emulated in float32 on real router inputs."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from dotmoe.artifacts import DenseModel
from dotmoe.errors import VerificationError
from dotmoe.export.routers import at_routers, router_exponent, shortfall
from dotmoe.gguf_export.architecture import GgufArchitecture
from dotmoe.layout import ExpertLayout
from dotmoe.moe.router import router_logits

MISROUTED, GATE_DEVIATION = 1e-2, 2.0**-6


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterCheck:
    """One layer's router as llama.cpp runs it, on the calibration tokens."""

    layer: int
    exponent: int
    """p: the router is written as 2^-p W_r."""
    logit_std: float
    """Standard deviation of the unscaled logits over tokens and experts."""
    gate_deviation: float
    """Largest difference between the weight of a chosen expert and 1."""
    misrouted: float
    """Share of tokens for which an expert left out has a larger logit than one chosen."""


def check_routers(
    dense: DenseModel,
    layout: ExpertLayout,
    output: GgufArchitecture,
    tokens_BT: Int[Tensor, "B T"],
) -> list[RouterCheck]:
    """Choose p of every split layer, and measure what llama.cpp's router does with it.

    Raises:
        VerificationError: A layer's weights or choices are too far off.
    """
    checks = []
    inputs = router_inputs(dense, layout, tokens_BT)
    for layer, logits_TE in zip(layout.moe_layers, inputs, strict=True):
        check = _check(layer, logits_TE, layout, output)
        _require(check, len(logits_TE))
        checks.append(check)
    return checks


def exponents_of(checks: Sequence[RouterCheck]) -> dict[int, int]:
    """P of each split layer."""
    return {check.layer: check.exponent for check in checks}


def router_inputs(
    dense: DenseModel, layout: ExpertLayout, tokens_BT: Int[Tensor, "B T"]
) -> list[Float[Tensor, "T E"]]:
    """Logits that the routers of the split layers see in the masked model, float32 on the CPU."""
    logits: dict[int, Tensor] = {}

    def keep(layer: int, x_TD: Tensor) -> None:
        logits[layer] = router_logits(x_TD, layout.router_LED[layer].to(x_TD.device)).cpu()

    at_routers(dense, layout, tokens_BT, keep)
    return [logits[layer] for layer in layout.moe_layers]


def _check(
    layer: int, logits_TE: Tensor, layout: ExpertLayout, output: GgufArchitecture
) -> RouterCheck:
    exponent = output.exponent
    if exponent is None:
        exponent = router_exponent(logits_TE)
    chosen_TK, weights_TK = output.weights(logits_TE * 2.0**-exponent, layout.active_experts)
    return RouterCheck(
        layer=layer,
        exponent=exponent,
        logit_std=float(logits_TE.double().std(correction=0)),
        gate_deviation=float((weights_TK - 1).abs().max()),
        misrouted=float((shortfall(logits_TE, chosen_TK) > 0).double().mean()),
    )


def _require(check: RouterCheck, num_tokens: int) -> None:
    most_misrouted = MISROUTED + 4 * (MISROUTED / num_tokens) ** 0.5
    limits = {
        "difference of an expert's weight from 1": (check.gate_deviation, GATE_DEVIATION),
        "share of tokens sent to other experts": (check.misrouted, most_misrouted),
    }
    for what, (value, limit) in limits.items():
        if not value <= limit:
            raise VerificationError(
                f"llama.cpp would run layer {check.layer} otherwise than the layout: {what} is "
                f"{value:.3g}, limit {limit:.3g}. Choose --format gguf_glm4moe."
            )
