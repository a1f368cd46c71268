"""What a person sees while a command runs: lines and progress bars, on standard error."""

from collections.abc import Iterator
from contextlib import contextmanager
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
    def bar(self, title: str) -> Iterator[Update]:
        """A progress bar, or a line at every tenth where the output is no terminal."""
        if not self.console.is_terminal:
            yield self._lines(title)
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
                bars.update(task, completed=done, total=total, note=note)

            yield update

    def _lines(self, title: str) -> Update:
        last_tenth = -1

        def update(done: int, total: int, note: str = "") -> None:
            nonlocal last_tenth
            tenth = 10 * done // max(1, total)
            if tenth > last_tenth:
                last_tenth = tenth
                self.log(f"{title}: {done} of {total} {note}".rstrip())

        return update
