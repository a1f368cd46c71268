"""What a benchmark measured, beside what the weights alone would allow."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from dotmoe.bench.points import LoadedModel, Point, Runtime
from dotmoe.bench.timing import Timing, ratio_quartiles
from dotmoe.bench.weights import ModelWeights, causal_keys, expected_experts

PROTOCOL = (
    "Both models are held in processes of their own. At each point they are warmed up, then take "
    "turns for the rounds, in alternating order; every round starts from the same cache. Tokens "
    "per second and their ratio are from the best decile of the times of all steps, the spread "
    "is the quartiles over rounds of the ratio of median times. Tokens are drawn evenly from the "
    "vocabulary. Ideal ratio: of the bytes of weights read (decode) or of the floating-point "
    "operations (prefill), dense / MoE, as the runtime stores the weights. Bytes of the cache are "
    "not in it: attention costs both models the same, and lowers the share as the context grows. A "
    "share of the ideal above 1 means that something else bounds the dense model."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPoint:
    """One model at one point."""

    tokens_per_s: float
    """From the best decile of the times."""
    timing: Timing
    peak_bytes: int
    """Largest memory while this point ran: of the process on a CPU, allocated on a GPU."""
    experts_touched: float
    """Distinct experts a split layer that run in a step; 0 for a dense model."""
    experts_touched_by: Literal["measured", "independent routing", "none"]
    """`measured` at the router in warm-up, mean over steps and layers; else E (1 - (1 - k/E)^T)."""
    weight_bytes: float
    """Bytes of weights that a step reads, if each that it needs is read once."""
    flops_per_token: float
    """Floating-point operations in matrix products, attention included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PointResult:
    """Both models at one point."""

    point: Point
    dense: ModelPoint
    moe: ModelPoint
    speed_ratio: float
    """Tokens per second, MoE / dense."""
    speed_ratio_quartiles: tuple[float, float]
    """Over rounds, from the median times of a round."""
    bytes_ratio: float
    """Bytes of weights read, dense / MoE: the ideal where reading weights bounds both."""
    flops_ratio: float
    """Operations, dense / MoE: the ideal where arithmetic bounds both."""

    @property
    def ideal_ratio(self) -> float:
        """`bytes_ratio` for decode, `flops_ratio` for prefill."""
        return self.bytes_ratio if self.point.name == "decode" else self.flops_ratio

    @property
    def share_of_ideal(self) -> float:
        """`speed_ratio / ideal_ratio`; above 1 where something else bounds the dense model."""
        return self.speed_ratio / self.ideal_ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchModel:
    """One of the two models."""

    name: str
    """As it was called."""
    loaded: LoadedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchResult:
    """A benchmark of a dense model and an MoE in one runtime."""

    runtime: Runtime
    dense: BenchModel
    moe: BenchModel
    points: tuple[PointResult, ...]
    settings: dict[str, Any]
    """All options, and what those left out were taken to be."""
    provenance: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, marked as measured."""
        points = [
            asdict(result)
            | {
                "speed_ratio_quartiles": list(result.speed_ratio_quartiles),
                "ideal_ratio": result.ideal_ratio,
                "share_of_ideal": result.share_of_ideal,
            }
            for result in self.points
        ]
        return {
            "origin": "measured",
            "protocol": PROTOCOL,
            "runtime": self.runtime,
            "dense": asdict(self.dense),
            "moe": asdict(self.moe),
            "points": points,
            "settings": self.settings,
            "provenance": self.provenance,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What one worker gave at one point."""

    weights: ModelWeights
    rounds: tuple[tuple[float, ...], ...]
    """Seconds of each step, by round."""
    experts_touched: float | None
    peak_bytes: int


def point_result(point: Point, dense: Measured, moe: Measured) -> PointResult:
    """Set both models' measurements side by side."""
    sides = model_point(point, dense), model_point(point, moe)
    return PointResult(
        point=point,
        dense=sides[0],
        moe=sides[1],
        speed_ratio=sides[1].tokens_per_s / sides[0].tokens_per_s,
        speed_ratio_quartiles=ratio_quartiles(dense.rounds, moe.rounds),
        bytes_ratio=sides[0].weight_bytes / sides[1].weight_bytes,
        flops_ratio=sides[0].flops_per_token / sides[1].flops_per_token,
    )


def model_point(point: Point, measured: Measured) -> ModelPoint:
    """One model's speed and work at a point."""
    weights, touched = measured.weights, measured.experts_touched
    timing = Timing.of(measured.rounds)
    tokens = point.tokens_per_step
    origin: Literal["measured", "independent routing", "none"] = "measured"
    if not weights.num_experts:
        touched, origin = 0.0, "none"
    elif touched is None:
        touched = expected_experts(weights.num_experts, weights.active_experts, tokens)
        origin = "independent routing"
    return ModelPoint(
        tokens_per_s=tokens / timing.best_decile_s,
        timing=timing,
        peak_bytes=measured.peak_bytes,
        experts_touched=touched,
        experts_touched_by=origin,
        weight_bytes=weights.touched_bytes(tokens, touched),
        flops_per_token=step_flops(point, weights) / tokens,
    )


def step_flops(point: Point, weights: ModelWeights) -> float:
    """Operations of a step; of decode, the mean over the steps of a round.

    A prompt needs the logits of its last token only.
    """
    if point.name == "prefill":
        return weights.flops(point.tokens, causal_keys(point.tokens), head_rows=1)
    keys = point.batch * causal_keys(point.steps, before=point.tokens) / point.steps
    return weights.flops(point.batch, keys, head_rows=point.batch)
