"""Seconds of named parts of a computation, and methods of an object that are timed by name."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch


class Clock:
    """Seconds of named parts.

    On CUDA by events, so that nothing waits inside a step. Of one CPU thread, the processor's
    seconds: what other processes do meanwhile is not counted. Of several threads, the wall's.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        one_thread = torch.get_num_threads() == 1
        self._read = time.process_time if one_thread else time.perf_counter
        self.kind = "CUDA events" if self.on_cuda else "processor" if one_thread else "wall"
        self._spans: dict[str, list[Any]] = defaultdict(list)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What happens inside belongs to `name`."""
        start = self._now()
        yield
        self._spans[name].append((start, self._now()))

    def seconds(self) -> dict[str, float]:
        """Of each part since the last call; waits for the device."""
        if self.on_cuda:
            torch.cuda.synchronize()
        found = {name: sum(map(self._between, spans)) for name, spans in self._spans.items()}
        self._spans.clear()
        return found

    def _now(self) -> Any:
        if not self.on_cuda:
            return self._read()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, span: tuple[Any, Any]) -> float:
        start, end = span
        seconds: float = start.elapsed_time(end) / 1e3 if self.on_cuda else end - start
        return seconds


def time_methods(owner: Any, parts: Mapping[str, str], clock: Clock) -> None:
    """From here on each call of a method of this one object belongs to a part of the clock.

    Args:
        owner: Any object whose class has no `__slots__`.
        parts: Part of the clock by name of the method.
        clock: Takes the time.
    """
    for method, part in parts.items():
        setattr(owner, method, _timed(getattr(owner, method), part, clock))


def _timed(method: Callable[..., Any], part: str, clock: Clock) -> Callable[..., Any]:
    @wraps(method)
    def timed(*arguments: Any, **options: Any) -> Any:
        with clock.part(part):
            return method(*arguments, **options)

    return timed
