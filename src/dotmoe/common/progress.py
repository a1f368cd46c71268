"""Lines and progress bars on standard error while a command runs."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

from rich import progress
from rich.console import Console
from rich.text import Text

from dotmoe.common.interrupts import raise_pending


class Update(Protocol):
    """A function that moves a progress bar."""

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Show `done` of `total`, and a note after the bar."""
        ...


def no_update(done: int, total: int, note: str = "") -> None:
    """An `Update` that shows nothing."""


class Progress:
    """Prints lines and bars; `Progress(quiet=True)` prints nothing. Text is printed literally."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)

    def log(self, text: str) -> None:
        """Print one line."""
        raise_pending()
        self.console.print(Text(text))

    @contextmanager
    def bar(self, title: str, tokens: int = 0) -> Iterator[Update]:
        """Within this context, show a progress bar; if output is no terminal, occasional lines.

        Lines come with the first and the last update, and between them after a tenth of the elapsed
        time, but at least 10 s and at most 5 minutes. `tokens` is the number of tokens per counted
        item, for the rate in tokens per second; 0: no rate.
        """
        columns = (
            progress.TextColumn("{task.description:<28}", markup=False),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("passed,"),
            progress.TimeRemainingColumn(),
            progress.TextColumn("left"),
            progress.TextColumn("{task.fields[note]}", markup=False),
        )
        is_shown, next_line = self.console.is_terminal, -math.inf
        with progress.Progress(
            *columns,
            console=self.console,
            disable=not is_shown,
            get_time=time.monotonic,
            speed_estimate_period=math.inf,
        ) as bars:
            number = bars.add_task(title, total=None, note="")
            (task,) = bars.tasks

            def update(done: int, total: int, note: str = "") -> None:
                nonlocal next_line
                raise_pending()
                if done < task.completed:  # a new count begins, such as that of the next model
                    bars.reset(number)
                    next_line = -math.inf
                bars.update(number, completed=done, total=total)
                speed, elapsed = task.speed, task.elapsed or 0.0
                rate = f"{tokens * speed:,.0f} tokens/s" if tokens and speed else ""
                bars.update(number, note=f"{rate} {note}".strip())
                if is_shown or (time.monotonic() < next_line and done < total):
                    return
                next_line = time.monotonic() + min(300.0, max(10.0, elapsed / 10))
                left = task.time_remaining
                words = f"{timedelta(seconds=left)} left" if left else ""
                parts = [f"{title}: {done:,} of {total:,}", rate, words, note]
                self.log(", ".join(part for part in parts if part))

            yield update
