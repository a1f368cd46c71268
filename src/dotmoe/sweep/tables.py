"""A sweep as tables: plain rows of text, and Markdown."""

from typing import Any, NamedTuple

from dotmoe.tables import millions, percent

_FIRST = {"experts": "E", "active": "aligned at", "start": "start", "methods": "method"}


class TextTable(NamedTuple):
    """A table whose cells are text."""

    columns: list[str]
    rows: list[list[str]]


def tables(summary: dict[str, Any]) -> list[TextTable]:
    """All models of a sweep, and where there is a grid, perplexity by trained and measured k."""
    columns = [_FIRST[summary["axis"]], "k of E", "active", "active parameters", "perplexity"]
    columns += ["nats above dense", "steps", "align, s"]
    has_recoveries = any("recovery_tokens" in row for row in summary["rows"])
    if has_recoveries:
        columns.append("finetuned on, tokens")
    rows = [_cells(row, has_recoveries=has_recoveries) for row in summary["rows"]]
    found = [TextTable(columns, rows)]
    if "grid" in summary:
        found.append(_grid(summary["grid"]))
    return found


def as_markdown(summary: dict[str, Any]) -> str:
    """The tables of a sweep, with the protocol below."""
    parts = []
    for table in tables(summary):
        lines = ["| " + " | ".join(table.columns) + " |", "|" + "---|" * len(table.columns)]
        lines += ["| " + " | ".join(row) + " |" for row in table.rows]
        parts.append("\n".join(lines))
    if "grid" in summary:
        parts.append(f"Second table: perplexity by k while aligned and k in the export; dense "
                     f"{summary['grid']['dense_perplexity']:.2f}.")  # fmt: skip
    return "\n\n".join([*parts, f"{', '.join(summary['text'])}: {summary['protocol']}", ""])


def _cells(row: dict[str, Any], *, has_recoveries: bool) -> list[str]:
    seconds = row.get("align_seconds")
    is_share = isinstance(row["value"], float)
    cells = [
        percent(row["value"]) if is_share else str(row["value"]),
        f"{row['active_experts']} of {row['num_experts']}" if "num_experts" in row else "-",
        percent(row["active_fraction"]),
        millions(row["parameters"]),
        f"{row['perplexity']:.2f}",
        f"{row['loss_above_dense']:.3f}",
        str(row.get("steps", "-")),
        "-" if seconds is None else f"{seconds:.0f}",
    ]
    if has_recoveries:
        tokens = row.get("recovery_tokens")
        cells.append("-" if tokens is None else f"{tokens:,}")
    return cells


def _grid(grid: dict[str, Any]) -> TextTable:
    shown = zip(grid["measured_at"], grid["active_experts"], strict=True)
    columns = ["aligned at", *(f"{percent(share)} (k = {k})" for share, k in shown)]
    trained = zip(grid["trained_at"], grid["perplexity_AB"], strict=True)
    rows = [[percent(share), *(f"{value:.2f}" for value in row)] for share, row in trained]
    return TextTable(columns, rows)
