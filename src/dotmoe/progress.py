"""What a person sees while a command runs: lines and progress bars, on standard error."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

from rich import progress
from rich.console import Console
from rich.text import Text


class Update(Protocol):
    """Moves a progress bar."""

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Show `done` of `total`, and a note behind the bar."""
        ...


def no_update(done: int, total: int, note: str = "") -> None:
    """An `Update` that shows nothing."""


class Progress:
    """Prints lines and bars; `Progress(quiet=True)` prints nothing. Text is printed as it is."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)

    def log(self, text: str) -> None:
        """Print one line."""
        self.console.print(Text(text))

    @contextmanager
    def bar(self, title: str, tokens: int = 0) -> Iterator[Update]:
        """A progress bar, or where the output is no terminal a line now and then.

        Lines come with the first and the last update, and between them after 10 s, later when a
        tenth more time has passed, at most 5 minutes. `tokens` is how many each of the things that
        are counted has, to state tokens a second.
        """
        speed = _Speed(tokens)
        if not self.console.is_terminal:
            yield self._lines(title, speed)
            return
        columns = (
            progress.TextColumn("{task.description:<28}", markup=False),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[note]}", markup=False),
        )
        with progress.Progress(*columns, console=self.console) as bars:
            task = bars.add_task(title, total=None, note="")

            def update(done: int, total: int, note: str = "") -> None:
                rate, _ = speed.after(done, total)
                bars.update(task, completed=done, total=total, note=f"{rate} {note}".strip())

            yield update

    def _lines(self, title: str, speed: "_Speed") -> Update:
        next_line = 0.0

        def update(done: int, total: int, note: str = "") -> None:
            nonlocal next_line
            rate, left = speed.after(done, total)
            if 0 < speed.seconds < next_line and done < total:
                return
            next_line = speed.seconds + min(300.0, max(10.0, speed.seconds / 10))
            parts = [f"{title}: {done:,} of {total:,}", rate, left, note]
            self.log(", ".join(part for part in parts if part))

        return update


class _Speed:
    """Tokens a second and time left, by the updates so far: the first may go on from another run.

    Less done than before begins another count, such as that of the next model.
    """

    seconds = 0.0

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._first: tuple[int, float] | None = None
        self._last = 0

    def after(self, done: int, total: int) -> tuple[str, str]:
        """Both in words, empty where they are not known yet."""
        now = time.monotonic()
        if self._first is None or done < self._last:
            self._first = done, now
        (first, started), self._last = self._first, done
        self.seconds, made = now - started, done - first
        if made <= 0 or self.seconds <= 0:
            return "", ""
        each = self.seconds / made
        rate = f"{self._tokens / each:,.0f} tokens/s" if self._tokens else ""
        left = str(timedelta(seconds=round(each * (total - done)))) + " left"
        return rate, left if done < total else ""
