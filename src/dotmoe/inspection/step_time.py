"""Seconds of a step: work over rates, each kind of work at its share of what a device can do."""

from collections.abc import Iterable
from dataclasses import dataclass

from dotmoe.inspection.work import Work


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Shares of a device's rates that the kinds of work in a step reach."""

    products: float
    """Matrix products, of the matmul rate."""
    attention: float
    """Attention, of the matmul rate."""
    moved: float
    """Operations without products, of the memory's rate."""
    logits: float
    """Softmaxes over the vocabulary, of the memory's rate."""
    origin: str


ON_CPU = Efficiency(
    products=0.9, attention=0.4, moved=0.65, logits=0.65, origin="fitted to measured steps"
)
ON_GPU = Efficiency(
    products=0.65, attention=0.35, moved=0.75, logits=0.75, origin="assumed, not measured"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """What one device can do, and how much of it a step is taken to reach."""

    flops_per_s: float
    """Of matrix products: measured on large ones, or a vendor's peak."""
    bytes_per_s: float
    """Of its memory, read and written: measured by copying, or a vendor's peak."""
    efficiency: Efficiency


def seconds(work: Work, speed: Speed) -> float:
    """Time of one part of a step.

        products / (u_p F) + attention / (u_a F) + moved / (u_m B) + logits / (u_l B)

    with the rates F, B of the device and its shares u. Kinds of work follow one another: nothing
    is taken to overlap within a device.

    Example:
        >>> half = Efficiency(products=0.5, attention=0.5, moved=0.5, logits=0.5, origin="said")
        >>> speed = Speed(flops_per_s=1e12, bytes_per_s=1e9, efficiency=half)
        >>> seconds(Work(part="a step", products=10**12, moved=10**9), speed)
        4.0
    """
    share = speed.efficiency
    products = work.products / share.products + work.attention / share.attention
    moved = work.moved / share.moved + work.logits / share.logits
    return products / speed.flops_per_s + moved / speed.bytes_per_s


def step_seconds(parts: Iterable[Work], speed: Speed) -> float:
    """Time of a step on one device, without communication."""
    return sum(seconds(part, speed) for part in parts)
