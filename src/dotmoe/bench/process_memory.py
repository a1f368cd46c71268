"""How much memory this process holds, and held at most."""

import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_FORGET_PEAK = "5"


def resident_bytes() -> int:
    """Memory that is resident now; elsewhere than on Linux, the most there was so far."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """Most memory that was resident since `forget_peak`, or since the start if it cannot forget."""
    return _status("VmHWM")


def forget_peak() -> None:
    """Let the peak start again from what is resident now, where the system allows it."""
    try:
        Path("/proc/self/clear_refs").write_text(_FORGET_PEAK, encoding="ascii")
    except OSError:
        return


def _status(field: str) -> int:
    if _STATUS.exists():
        for line in _STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    # Not on every system, and on Linux it still counts the process that started this one.
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
