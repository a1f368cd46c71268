"""Lines and progress bars on standard error while a command runs."""

import html
import logging
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

_LONGEST_S = 1e9
"""Longest time left that is shown, some thirty years; `timedelta` holds no time without end."""
_warned = set[str]()
"""Texts that `warn_once` has shown; a row of a million would else make a record each."""


class Update(Protocol):
    """A function that moves a progress bar."""

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Show `done` of `total`, and a note after the bar."""
        ...


def no_update(done: int, total: int, note: str = "") -> None:
    """An `Update` that shows nothing."""


def warn_once(logger: logging.Logger, text: str) -> None:
    """Print a warning, once for each text; a context of `warnings_once` begins anew."""
    if text not in _warned:
        _warned.add(text)
        logger.warning(text)


@contextmanager
def warnings_once() -> Iterator[None]:
    """Within this context, log records of the same text are shown once.

    One call may load a model three times, but warns of it once.
    """
    _warned.clear()
    said = dict[str, logging.LogRecord]()

    def is_new(record: logging.LogRecord) -> bool:
        return said.setdefault(record.getMessage(), record) is record

    shown = [*logging.root.handlers]
    if not shown and logging.lastResort is not None:
        shown = [logging.lastResort]
    for handler in shown:
        handler.addFilter(is_new)
    try:
        yield
    finally:
        for handler in shown:
            handler.removeFilter(is_new)


class _NotebookBar:
    """A progress bar as HTML below the cell of a notebook, without widgets."""

    def __init__(self, title: str) -> None:
        from IPython.display import HTML, display  # a notebook has it

        self.title = title
        self._html = HTML
        self._cell = display(HTML(""), display_id=True)
        self._next = -math.inf

    def show(self, done: int, total: int, note: str) -> None:
        """Move the bar, at most four times a second."""
        if time.monotonic() < self._next and done < total:
            return
        self._next = time.monotonic() + 0.25
        words = html.escape(f"{self.title}: {done:,} of {total:,} {note}".rstrip())
        bar = f'<progress value="{done}" max="{max(total, 1)}"></progress> {words}'
        self._cell.update(self._html(bar))


def _columns() -> list[progress.ProgressColumn]:
    """What a bar shows of its task, from left to right; for one bar, since columns keep texts."""
    return [
        progress.TextColumn("{task.description:<28}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("passed"),
        progress.TextColumn("{task.fields[note]}", markup=False),
    ]


class _Pace:
    """How fast a count goes, from its first update on: what was done before took other time."""

    def __init__(self, done: int) -> None:
        self.done = done
        self._first = done
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the first update."""
        return time.monotonic() - self._started

    def rate(self, tokens: int) -> str:
        """Tokens per second, of so many for each item; empty before anything is counted."""
        counted = self.done - self._first
        if not tokens or not counted or not self.seconds:
            return ""
        return f"{tokens * counted / self.seconds:,.0f} tokens/s"

    def left(self, total: int) -> str:
        """The time that the rest of `total` takes; empty before anything is counted."""
        counted = self.done - self._first
        if not counted or self.done >= total:
            return ""
        seconds = self.seconds * (total - self.done) / counted
        return f"{timedelta(seconds=math.ceil(min(seconds, _LONGEST_S)))} left"


class Progress:
    """Prints lines and bars; `Progress(quiet=True)` prints nothing. Text is printed literally."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is printed."""
        return self.console.quiet

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
        is_shown = self.console.is_terminal
        next_line = -math.inf
        is_in_notebook = self.console.is_jupyter and not self.is_quiet
        cell = _NotebookBar(title) if is_in_notebook else None
        with progress.Progress(
            *_columns(),
            console=self.console,
            disable=not is_shown,
            get_time=time.monotonic,
        ) as bars:
            number = bars.add_task(title, total=None, note="")
            pace: _Pace | None = None

            def update(done: int, total: int, note: str = "") -> None:
                nonlocal next_line, pace
                raise_pending()
                if pace is None or done < pace.done:  # such as the count of the next model
                    pace = _Pace(done)
                    bars.reset(number)
                    next_line = -math.inf
                pace.done = done
                parts = [pace.rate(tokens), pace.left(total), note]
                words = ", ".join(filter(None, parts))
                bars.update(number, completed=done, total=total, note=words)
                if cell:
                    cell.show(done, total, words)
                    return
                if is_shown or (time.monotonic() < next_line and done < total):
                    return
                next_line = time.monotonic() + min(300.0, max(10.0, pace.seconds / 10))
                self.log(", ".join(filter(None, [f"{title}: {done:,} of {total:,}", words])))

            yield update
