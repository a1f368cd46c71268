"""How much a runtime's router may differ from the layout's before an export is refused."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dotmoe.export.router_scale import RouterScale
from dotmoe.export.verification_error import VerificationError


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingLimits:
    """What is tolerated in every runtime.

    At the recommended scale 148 experts of random float32 logits come to 0.4 % misrouted tokens,
    an alignment at k = E / 2, where logits lie closest, to 1.2 %, and a training-free start, whose
    logits reach to 15 standard deviations, to gates of 1.0085. These are near-ties; a scale that
    is wrong misroutes every tenth token or more.
    """

    misrouted: float = 1e-2
    """Largest share of tokens that the scale misroutes, beyond four standard errors of the
    sample."""
    gate_deviation: float = 2.0**-6
    """Largest `RuntimeRouting.gate_deviation`; rounding of weights to bfloat16 is at most 2^-8."""


def require_routable(
    layers: Iterable[int],
    scales: Sequence[RouterScale],
    num_tokens: int,
    limits: RoutingLimits,
) -> None:
    """Refuse scaled routers that some runtime could not follow.

    Args:
        layers: Numbers of the split layers.
        scales: Of these layers.
        num_tokens: Tokens that the scales were measured on.
        limits: See `RoutingLimits`.

    Raises:
        VerificationError: Names layer, runtime, figure, limit and remedy of the first beyond one.
    """
    misrouted = limits.misrouted + 4 * (limits.misrouted / num_tokens) ** 0.5
    for layer, scale in zip(layers, scales, strict=True):
        for routing in scale.runtimes:
            place = f"layer {layer} in {routing.runtime}"
            _at_most(
                routing.misrouted,
                misrouted,
                f"{place}: share of misrouted tokens",
                "Choose a larger expert_size, so that logits lie further apart",
            )
            _at_most(
                routing.gate_deviation,
                limits.gate_deviation,
                f"{place}: 95th percentile of the deviation of a gate from 1",
                "Align the routers for longer, since some logits lie far outside the others",
            )


def _at_most(value: float, limit: float, what: str, remedy: str) -> None:
    # Written so that NaN fails too.
    if not value <= limit:
        raise VerificationError(
            f"The exported model would not compute what the layout says: {what} is {value:.3g}, "
            f"limit {limit:.3g}. {remedy}, or choose another export format."
        )
