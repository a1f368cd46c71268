"""How long an alignment takes on this machine: two short measurements, and the model of a step."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dotmoe.inspection.sizes import RunSize, Sizes
from dotmoe.inspection.step_time import ON_CPU, ON_GPU, Speed, step_seconds
from dotmoe.inspection.work import alignment_work


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRates:
    """How fast one device multiplies square matrices, and copies what is larger than caches."""

    device: str
    dtype: str
    """Of the matrices."""
    flops_per_s: float
    bytes_per_s: float
    """Read and written."""


def measure_rates(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.3) -> DeviceRates:
    """Multiply square matrices for a moment, and copy for another; each is done at least once.

    Args:
        device: Of this machine.
        dtype: Of the matrices.
        seconds: About how long, for each.
    """
    width = 512 if device.type == "cpu" else 8_192
    # Varied entries: a GPU multiplies constants faster than it would real data.
    matrix = torch.linspace(-1, 1, width * width, device=device).view(width, width).to(dtype)
    entries = (1 << 24) if device.type == "cpu" else (1 << 28)
    source = torch.zeros(entries, device=device)
    target = torch.empty_like(source)

    def multiply() -> None:
        _ = (matrix @ matrix)[0, 0].item()  # waits for the device

    def copy() -> None:
        _ = target.copy_(source)[0].item()

    shown = torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
    return DeviceRates(
        device=shown,
        dtype=str(dtype).removeprefix("torch."),
        flops_per_s=2 * width**3 * _times_per_second(multiply, seconds),
        bytes_per_s=2 * source.nbytes * _times_per_second(copy, seconds),
    )


def _times_per_second(work: Callable[[], None], seconds: float) -> float:
    work()
    start, done = time.perf_counter(), 0
    while done == 0 or time.perf_counter() - start < seconds:
        work()
        done += 1
    return done / (time.perf_counter() - start)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeHere:
    """Estimated hours of the alignment on this machine, at the micro-batch that was asked for."""

    device: str
    dtype: str
    """Of the weights, and of the products whose rate it is."""
    flops_per_s: float
    bytes_per_s: float
    origin: str
    """Of the rates."""
    hours: float
    """Without activation checkpointing."""
    hours_checkpointing: float


def time_here(sizes: Sizes, run: RunSize, rates: DeviceRates) -> TimeHere:
    """Hours of the alignment on this machine, one device.

    Args:
        sizes: Of model and split.
        run: The run, its device resolved.
        rates: Of this machine.
    """
    speed = Speed(
        flops_per_s=rates.flops_per_s,
        bytes_per_s=rates.bytes_per_s,
        efficiency=ON_CPU if run.device == "cpu" else ON_GPU,
    )
    hours = []
    for checkpointing in (False, True):
        work = alignment_work(sizes, run, checkpointing=checkpointing)
        hours.append(run.steps * step_seconds(work, speed) / 3_600)
    return TimeHere(
        device=rates.device,
        dtype=rates.dtype,
        flops_per_s=rates.flops_per_s,
        bytes_per_s=rates.bytes_per_s,
        origin="measured",
        hours=hours[0],
        hours_checkpointing=hours[1],
    )
