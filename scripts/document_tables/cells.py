"""How numbers and rows look in a document."""

import math
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean, stdev
from typing import Any

from document_tables.records import Nothing
from dotmoe.measure.evaluate.difference import difference


def tabled(rows: Iterable[Any], columns: Mapping[str, Callable[[Any], Any]], words: int = 1) -> str:
    """A Markdown table with a row for each of `rows`; the first `words` columns hold text.

    A column without any value is an error, most likely of its function.
    """
    lines = [[shown_cell(show(row)) for show in columns.values()] for row in rows]
    for name, *cells in zip(columns, *lines, strict=True):
        if {*cells} == {"-"}:
            raise SystemExit(f"No row has a value of {name}.")
    rules = ["---" if index < words else "---:" for index in range(len(columns))]
    table = "\n".join(f"| {' | '.join(line)} |" for line in [[*columns], rules, *lines])
    return table.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")  # a figure is one word


def shown_cell(value: Any) -> str:
    """Text of a cell; a dash for a missing value."""
    return "-" if value is None else f"{value}"


def made(record: Any) -> str:
    """Commit, hardware and versions of a measurement."""
    by = record.provenance
    commit = f"commit `{by.commit}`" if by.commit else "a commit that was not recorded"
    threads = ""
    if by.threads:
        threads = "1 thread, " if by.threads == 1 else f"{by.threads} threads, "
    return f"Measured at {commit} on {by.hardware}, {threads}torch {by.versions.torch}"


def times(above: float, stderr: float) -> str:
    """Perplexity times dense with its standard error, of nats above the dense model's."""
    return f"{math.exp(above):.2f} ± {math.exp(above) * stderr:.2f}"


def above_dense(result: Any, dense: Any) -> str:
    """Perplexity of a result times that of the dense model, with its standard error."""
    nats, stderr = difference(result, dense)
    assert stderr is not None, "files of results keep the losses of windows"
    return times(nats, stderr)


def score(tasks: Any, names: Iterable[str] = ()) -> str | Nothing:
    """Mean accuracy in percent over all or some tasks, and its standard error."""
    if not tasks:
        return Nothing()
    counted = [tasks[name] for name in names or tasks]
    error = math.hypot(*(task.stderr for task in counted)) / len(counted)
    return f"{100 * fmean(task.value for task in counted):.1f} ± {100 * error:.1f}"


def above_chance(tasks: Any) -> list[str]:
    """Tasks on which a model is better than guessing by more than two standard errors."""
    return [n for n, task in tasks.items() if task.value - task.chance > 2 * task.stderr]


def points(changes: list[float]) -> str:
    """Mean change in percentage points, and its standard error."""
    return f"{100 * fmean(changes):+.1f} ± {100 * stdev(changes) / len(changes) ** 0.5:.1f}"


def shown(number: Any) -> str:
    """A number with three or four digits; any other value unchanged."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return f"{number}" if number else ""
    if isinstance(number, int) or abs(number) >= 100:
        return f"{number:,.0f}"
    return f"{number:.2f}" if abs(number) >= 10 else f"{number:.3f}"


def grid(rows: Any, show: Any = shown) -> str:
    """Named rows of named values as a table."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = [["", *columns], ["---", *["---:"] * len(columns)]]
    lines += [[name, *(show(row.get(c, "")) for c in columns)] for name, row in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def about(hours: float) -> str:
    """An estimated duration in whole minutes or hours."""
    if hours < 1 / 60:
        return "under 1 min"
    return f"{60 * hours:.0f} min" if hours < 1.5 else f"{hours:.0f} h"


def commits(record: Any) -> str:
    """Commit or commits of a result file, in code style."""
    made_at = record.made_at or record.provenance.commit.split(", ")
    return ", ".join(f"`{commit}`" for commit in made_at)
