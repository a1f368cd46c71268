"""SIGTERM and SIGINT during training: the running step ends, its state is saved, then we stop."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from dotmoe.distributed import num_ranks

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SECONDS_APART = 3.0


class StopRequest:
    """Which signal has asked this process to stop, if one has."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._time = 0.0

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """Take note of a signal; SIGINT after another one interrupts at once.

        One Ctrl-C reaches ranks twice, from the terminal and from torchrun: there, a second one
        counts only after three seconds.
        """
        now = time.monotonic()
        if self.signum is None:
            self.signum, self._time = signum, now
        elif signum == signal.SIGINT and (num_ranks() == 1 or now - self._time > _SECONDS_APART):
            raise KeyboardInterrupt


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Inside, both signals are noted instead of interrupting; an ignored one stays ignored.

    Handlers belong to the main thread: in any other, nothing is noted and nothing changed.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in previous.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, request.handle)
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
