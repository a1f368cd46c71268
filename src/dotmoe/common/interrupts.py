"""SIGINT, SIGTERM and SIGHUP that are not lost: what swallows them does not keep a command going.

Python swallows an exception that is raised in a destructor, and a library may catch all. So a
handler also records its signal. A destructor's is sent again; any is raised again by
`raise_pending`, which progress bars call, and at the end of the command.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread, current_thread, main_thread
from types import FrameType
from typing import Any

from dotmoe.common.errors import Interrupted

_AGAIN_S = 0.05
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_pending = list[int]()


def raise_pending() -> None:
    """Raise what a signal raised before, if that was swallowed; nothing while it is on its way.

    As signals do, it raises in the main thread alone.
    """
    is_on_its_way = isinstance(sys.exc_info()[1], KeyboardInterrupt)
    if _pending and not is_on_its_way and current_thread() is main_thread():
        raise _interrupt(_pending[-1])


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """Within this context, these signals raise KeyboardInterrupt until it leaves the context.

    SIGINT and SIGHUP stay ignored if they are, as in a background process of a shell, and by nohup.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    _pending.clear()
    for number, handler in before.items():
        stays_ignored = handler is signal.SIG_IGN and number != signal.SIGTERM
        if not stays_ignored:
            signal.signal(number, _handle)
    try:
        with _sent_again_if_swallowed():
            yield
            raise_pending()
    finally:
        for number, handler in before.items():
            if handler is not None:  # else no handler of Python's, so none that it can set again
                signal.signal(number, handler)
        _pending.clear()


@contextmanager
def _sent_again_if_swallowed() -> Iterator[None]:
    """Within this context, a signal whose exception a destructor swallows is sent again."""
    before_hook = sys.unraisablehook
    has_ended = Event()

    def swallowed(event: Any) -> None:
        if not _pending or not isinstance(event.exc_value, KeyboardInterrupt):
            before_hook(event)
            return
        number, hook_has_ended = _pending[-1], Event()

        def send_again() -> None:
            hook_has_ended.wait()  # else it would be raised in the hook, and swallowed again
            if not has_ended.wait(_AGAIN_S):
                os.kill(os.getpid(), number)

        Thread(target=send_again, daemon=True).start()
        hook_has_ended.set()

    sys.unraisablehook = swallowed
    try:
        yield
    finally:
        has_ended.set()
        sys.unraisablehook = before_hook


def _handle(signum: int, frame: FrameType | None) -> None:
    _pending.append(signum)
    raise _interrupt(signum)


def _interrupt(signum: int) -> KeyboardInterrupt:
    if signum == signal.SIGINT:
        return KeyboardInterrupt()
    name = signal.Signals(signum).name
    return Interrupted(signum, f"{name} stopped it. What is finished is kept")
