"""How long an alignment takes: a short measurement here, vendors' figures for other devices."""

import time
from dataclasses import dataclass

import torch

from dotmoe.inspection.costs import Item, total

UTILISATION = 0.4
"""Share of a matrix-product rate that a whole alignment step is assumed to reach."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulRate:
    """How fast one device multiplies square matrices."""

    device: str
    dtype: str
    flops_per_s: float


def measure_matmul_rate(
    device: torch.device, dtype: torch.dtype, *, seconds: float = 0.3
) -> MatmulRate:
    """Multiply square matrices for a moment; at least two products are done.

    Args:
        device: Of this machine.
        dtype: Of the matrices.
        seconds: About how long.
    """
    width = 512 if device.type == "cpu" else 8_192
    # Varied entries: a GPU multiplies constants faster than it would real data.
    matrix = torch.linspace(-1, 1, width * width, device=device).view(width, width).to(dtype)
    product = matrix @ matrix
    _ = product[0, 0].item()  # waits for the device
    start, products = time.perf_counter(), 0
    while products == 0 or time.perf_counter() - start < seconds:
        product = matrix @ matrix
        _ = product[0, 0].item()
        products += 1
    elapsed = time.perf_counter() - start
    shown = torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
    return MatmulRate(
        device=shown,
        dtype=str(dtype).removeprefix("torch."),
        flops_per_s=2 * width**3 * products / elapsed,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """A GPU type for planning with bfloat16 weights; figures quoted from its vendor."""

    name: str
    peak_flops_per_s: float
    """Dense bfloat16 tensor-core peak."""
    memory_bytes: int
    origin: str = "quoted"


ACCELERATORS = (
    Accelerator(name="A100 80 GB", peak_flops_per_s=312e12, memory_bytes=80 * 10**9),
    Accelerator(name="H100 80 GB", peak_flops_per_s=989e12, memory_bytes=80 * 10**9),
    Accelerator(name="H200 141 GB", peak_flops_per_s=989e12, memory_bytes=141 * 10**9),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTime:
    """Estimated hours of the alignment on one device."""

    device: str
    dtype: str
    """Of the weights, and of the products whose rate it is."""
    flops_per_s: float
    """Rate that the estimate starts from; `UTILISATION` of it is assumed."""
    origin: str
    """`measured` here, or `quoted` from the vendor."""
    hours: float
    """Without activation checkpointing."""
    hours_checkpointing: float
    """With it: one student forward more."""
    fits: str | None
    """`yes`, `with checkpointing` or `no`: alignment in its memory; None: not judged."""


def planned_times(
    flops: tuple[Item, ...], rate: MatmulRate, memory: int, memory_checkpointing: int
) -> tuple[PlannedTime, ...]:
    """Hours of the alignment here (first) and on each of `ACCELERATORS`.

    Args:
        flops: Items of the alignment, without checkpointing.
        rate: Of this machine.
        memory: Bytes that the alignment needs with bfloat16 weights, without checkpointing.
        memory_checkpointing: The same with checkpointing.
    """
    plain = total(flops)
    again = plain + next(item.amount for item in flops if item.name == "student forward")

    def planned(
        device: str, dtype: str, flops_per_s: float, origin: str, fits: str | None
    ) -> PlannedTime:
        per_hour = flops_per_s * UTILISATION * 3_600
        return PlannedTime(
            device=device,
            dtype=dtype,
            flops_per_s=flops_per_s,
            origin=origin,
            hours=plain / per_hour,
            hours_checkpointing=again / per_hour,
            fits=fits,
        )

    here = planned(rate.device, rate.dtype, rate.flops_per_s, "measured", None)
    others = []
    for gpu in ACCELERATORS:
        smaller = "with checkpointing" if memory_checkpointing <= gpu.memory_bytes else "no"
        fits = "yes" if memory <= gpu.memory_bytes else smaller
        others.append(planned(gpu.name, "bfloat16", gpu.peak_flops_per_s, gpu.origin, fits))
    return here, *others
