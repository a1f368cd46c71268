"""What a person sees while a run goes on: lines and progress bars, on standard error."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Update(Protocol):
    """Moves a bar."""

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Show `done` of `total`, and a note behind the bar."""
        ...


class Narrator:
    """Speaks to a console; `Narrator(quiet=True)` says nothing, as a library should."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """One line."""
        self.console.print(text)

    @contextmanager
    def bar(self, title: str) -> Iterator[Update]:
        """A progress bar. Where the output is no terminal: a line at every tenth instead."""
        if not self.console.is_terminal:
            yield self._lines(title)
            return
        columns = (
            TextColumn("{task.description:<28}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task(title, total=None, note="")

            def update(done: int, total: int, note: str = "") -> None:
                progress.update(task, completed=done, total=total, note=note)

            yield update

    def _lines(self, title: str) -> Update:
        told = -1

        def update(done: int, total: int, note: str = "") -> None:
            nonlocal told
            tenth = 10 * done // max(1, total)
            if tenth > told:
                told = tenth
                self.say(f"{title}: {done} of {total} {note}".rstrip())

        return update
