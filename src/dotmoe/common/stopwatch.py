"""Time that work has taken."""

import resource
import time


class Stopwatch:
    """Time since it was made: on the clock, and of all cores in this process and its children."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._cpu_started = _cpu_seconds()

    def read(self) -> dict[str, float]:
        """`seconds` on the clock and `cpu_seconds`, rounded to milliseconds."""
        return {
            "seconds": round(time.monotonic() - self._started, 3),
            "cpu_seconds": round(_cpu_seconds() - self._cpu_started, 3),
        }


def _cpu_seconds() -> float:
    """CPU seconds of this process, and of those of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
