"""Tables of formatted text for a terminal, Markdown and the report; number formats."""

import html
import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Formatted text in rows and columns; None where there is no value."""

    title: str = ""
    columns: Sequence[str]
    rows: Sequence[Sequence[str | None]]
    note: str = ""
    """Text below the table."""
    words: int = 1
    """Number of leading text columns; the others hold numbers and are aligned to the right."""


def table_of(
    items: Iterable[Any], columns: Mapping[str, Callable[[Any], str | None]], **options: Any
) -> Table:
    """A table with a row for each item; `columns` maps headings to functions that format a cell."""
    rows = [[show(item) for show in columns.values()] for item in items]
    return Table(columns=tuple(columns), rows=rows, **options)


def to_rich(table: Table) -> RichTable:
    """The table for a terminal. Cells are plain text: brackets in them are not markup."""
    rich = RichTable(
        title=Text(table.title, style="bold") if table.title else None,
        title_justify="left",
        caption=Text(table.note, style="dim") if table.note else None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        show_header=any(table.columns),
    )
    for index, column in enumerate(table.columns):
        rich.add_column(
            Text(column), justify="left" if index < table.words else "right", overflow="fold"
        )
    for row in table.rows:
        cells = ["-" if cell is None else cell for cell in row]
        rich.add_row(*(Name(cell) if "/" in cell else Text(cell) for cell in cells))
    return rich


class Name:
    """A path or hub name in a cell, broken after slashes where the column is narrow."""

    def __init__(self, text: str) -> None:
        self.parts = re.findall(r"[^/]*/|[^/]+", text)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lines of whole parts, as wide as the column."""
        lines = _filled(self.parts, options.max_width, "")
        yield Text("\n".join(lines), overflow="fold")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """From the longest part to the whole."""
        return Measurement(max(map(len, self.parts)), sum(map(len, self.parts)))


class ShellCommand:
    """A command to copy, broken between its words by backslashes where it is too wide."""

    def __init__(self, label: str, words: Sequence[str]) -> None:
        self.label, self.words = label, [shlex.quote(word) for word in words]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The label, and the command beside it."""
        room = options.max_width - len(self.label) - len(" \\")
        lines = _filled(self.words, room, " ")
        below = " \\\n" + " " * len(self.label)
        yield whole_line(self.label + below.join(lines))


def whole_line(text: str) -> Text:
    """Text that is not broken where the terminal is narrow, such as a path to copy."""
    return Text(text, no_wrap=True, overflow="ignore")


def _filled(parts: Sequence[str], width: int, between: str) -> list[str]:
    """Parts joined to lines no wider than this, if no part is."""
    lines = list(parts[:1])
    for part in parts[1:]:
        longer = lines[-1] + between + part
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(part)
    return lines


def to_markdown(table: Table) -> str:
    """The table in Markdown, its title above and its note below as paragraphs."""
    rules = ["---" if index < table.words else "---:" for index in range(len(table.columns))]
    cells = [
        ["-" if cell is None else cell.replace("|", "\\|") for cell in row] for row in table.rows
    ]
    lines = [f"| {' | '.join(row)} |" for row in [table.columns, rules, *cells]]
    parts = (table.title, "\n".join(lines), table.note)
    return without_html("\n\n".join(part for part in parts if part))


def shown_as_text(parts: Iterable[Table | str]) -> str:
    """Tables and paragraphs as plain text, as wide as the terminal."""
    console = Console(file=StringIO(), color_system=None, force_jupyter=False, markup=False)
    with console.capture() as captured:
        for part in parts:
            console.print(to_rich(part) if isinstance(part, Table) else whole_line(part))
    lines = captured.get().splitlines()
    return "\n".join(line.rstrip() for line in lines).strip("\n")


def shown_as_html(parts: Iterable[Table | str]) -> str:
    """Tables and paragraphs as HTML."""
    return "\n".join(
        _to_html(part) if isinstance(part, Table) else f"<p>{_html_text(part)}</p>"
        for part in parts
    )


def _to_html(table: Table) -> str:
    """One table as HTML, its title as the caption and its note below as a paragraph."""
    rows = [_html_row("td", row, table.words) for row in table.rows]
    if any(table.columns):
        rows = [_html_row("th", table.columns, table.words), *rows]
    caption = f"<caption>{_html_text(table.title)}</caption>" if table.title else ""
    note = f"<p>{_html_text(table.note)}</p>" if table.note else ""
    return "\n".join(["<table>", caption, *rows, "</table>", note])


def _html_row(kind: str, cells: Sequence[str | None], words: int) -> str:
    """One row: cells of text to the left, numbers to the right."""
    made = list[str]()
    for index, cell in enumerate(cells):
        side = "left" if index < words else "right"
        text = "-" if cell is None else _html_text(cell)
        made.append(f'<{kind} style="text-align: {side}">{text}</{kind}>')
    return f"<tr>{''.join(made)}</tr>"


def _html_text(text: str) -> str:
    """Text as HTML, its lines kept."""
    return html.escape(text).replace("\n", "<br>")


def without_html(value: Any) -> str:
    """Text for Markdown in which no name, such as that of a folder, begins an HTML tag."""
    return str(value).replace("<", "&lt;")


def percent(share: float) -> str:
    """A share in percent, with one decimal below 10 %: 25 %, 3.1 %."""
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"


def millions(number: float) -> str:
    """A count in millions or billions: 3.14M, 7.00B."""
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.2f}M"


def in_bytes(amount: float) -> str:
    """A size in binary units: 12 B, 3.00 GiB."""
    if amount < 1_024:
        return f"{amount:.0f} B"
    power = min(int(math.log2(amount)) // 10, 4)
    return f"{amount / 1_024**power:.2f} {'KMGT'[power - 1]}iB"


def in_about(amount: float) -> str:
    """An estimated size in binary units, to two digits or the whole unit: 31 GiB, 1.4 MiB."""
    exact = in_bytes(amount)
    number, unit = exact.split(" ")
    digits = 0 if float(number) >= 10 or unit == "B" else 1
    return f"{float(number):.{digits}f} {unit}"


def in_time(hours: float) -> str:
    """A duration in the unit that keeps its number small: 18 s, 30 min, 12.3 h, 4.2 days."""
    seconds = 3_600 * hours
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6_000:
        return f"{seconds / 60:.0f} min"
    if hours < 48:
        return f"{hours:.1f} h"
    return f"{hours / 24:.1f} days" if hours < 17_520 else f"{hours / 8_766:,.0f} years"


def figure(value: Any, form: str = ".4g") -> str:
    """Text of a value: a number such as 0.1235 or 1,200, a dash if there is none, or the text."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, bool | str):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else format(value, form)
