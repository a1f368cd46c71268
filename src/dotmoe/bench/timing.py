"""Seconds of repeated rounds in a few figures."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds of a step, over all steps of all rounds."""

    best_decile_s: float
    """A tenth of the steps were at most as long. What other processes cost is mostly above it."""
    median_s: float
    worst_decile_s: float
    """A tenth of the steps were at least as long."""
    samples: int

    @classmethod
    def of(cls, rounds: Sequence[Sequence[float]]) -> "Timing":
        """From the seconds of each step, by round; at least one."""
        seconds = sorted(second for one in rounds for second in one)
        return cls(
            best_decile_s=quantile(seconds, 0.1),
            median_s=median(seconds),
            worst_decile_s=quantile(seconds, 0.9),
            samples=len(seconds),
        )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between the two nearest of ascending values.

    Example:
        >>> quantile([1.0, 2.0, 3.0], 0.25)
        1.5
    """
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def ratio_quartiles(
    dense: Sequence[Sequence[float]], moe: Sequence[Sequence[float]]
) -> tuple[float, float]:
    """First and third quartile, over rounds, of how many times faster the MoE was in a round."""
    ratios = sorted(median(a) / median(b) for a, b in zip(dense, moe, strict=True))
    return quantile(ratios, 0.25), quantile(ratios, 0.75)
