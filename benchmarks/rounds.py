"""Shared by all benchmarks: measuring in turns, ratios within a turn, and writing results."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from dotmoe.common.files import write_json
from dotmoe.run.provenance import provenance

Measured = TypeVar("Measured")
Name = TypeVar("Name")
Product = tuple[int, int, int]
"""Rows, inner size and columns of a matrix product."""


class Clock:
    """Stopwatch for named parts of a step; waits for the device before each reading.

    On a CPU with one thread it counts processor time, which excludes other processes. Otherwise
    it counts wall time.
    """

    def __init__(self, device: torch.device) -> None:
        of_processor = device.type == "cpu" and torch.get_num_threads() == 1
        self.kind = "processor" if of_processor else "wall"
        self._now = time.process_time if of_processor else time.perf_counter
        self._wait: Any = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Within this context, time counts towards the part `name`."""
        self._wait()
        start = self._now()
        yield
        self._wait()
        self._seconds[name] += self._now() - start

    def seconds(self) -> dict[str, float]:
        """Seconds of each part since the last call; starts again from zero."""
        seconds, self._seconds = self._seconds, defaultdict(float)
        return dict(seconds)


def in_turns(
    subjects: Mapping[Name, Callable[[], Measured]], rounds: int, seconds: float = math.inf
) -> dict[Name, list[Measured]]:
    """Return values of each subject in every round, after one round that is not counted.

    Subjects take turns, so that other load on the machine affects all of them alike. After
    `seconds` no round begins but the first that counts.
    """
    found: dict[Name, list[Measured]] = {name: [] for name in subjects}
    started = time.monotonic()
    for number in range(rounds + 1):
        if number > 1 and time.monotonic() - started > seconds:
            break
        for name, measure in subjects.items():
            measured = measure()
            if number:
                found[name].append(measured)
    return found


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Median over rounds of every value."""
    return {name: median(one[name] for one in rounds) for name in rounds[0]}


def ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """Median of `one / other` within each round."""
    return median(a / b for a, b in zip(one, other, strict=True))


def rates(device: torch.device, dtype: torch.dtype, *others: Product) -> dict[str, float]:
    """Rates of the best of four products of each size, a square first, and of three copies."""
    on_cpu, clock, flops_per_s = device.type == "cpu", Clock(device), 0.0
    for rows, inner, columns in ((512 if on_cpu else 8_192,) * 3, *others):
        # Varied entries: a GPU multiplies constants faster than it would real data.
        left = torch.randn(rows, inner, device=device).to(dtype)
        right = torch.randn(columns, inner, device=device).to(dtype)
        for _ in range(4):
            with clock.part("product"):
                F.linear(left, right)
            rate = 2 * rows * inner * columns / clock.seconds()["product"]
            flops_per_s = max(flops_per_s, rate)
    source = torch.zeros(1 << (24 if on_cpu else 28), device=device)
    target, copying = torch.empty_like(source), float("inf")
    for _ in range(3):
        with clock.part("copy"):
            target.copy_(source)
        copying = min(copying, clock.seconds()["copy"])
    return {"matmul_flops_per_s": flops_per_s, "copy_bytes_per_s": 2 * source.nbytes / copying}


def keep(out: Path | str, figures: dict[str, Any], seed: int = 0) -> None:
    """Write measured values as JSON, with their provenance."""
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"origin": "measured", **figures, "provenance": provenance(seed)})
