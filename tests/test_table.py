"""Tables and numbers as text."""

import io

import pytest
from rich.console import Console

from dotmoe.common.tables import (
    Table,
    to_rich,
)

TABLE = Table(
    title="of [two] models",
    columns=("model", "perplexity, per cent of the dense"),
    rows=[("dense [a|b]", "14.87"), ("MoE, of experts that run", None)],
    note="lower is [/better]",
)


@pytest.mark.parametrize("width", [80, 34])
def test_a_terminal_shows_brackets_as_they_are_and_a_narrow_one_loses_no_word(width):
    console = Console(file=io.StringIO(), width=width)
    console.print(to_rich(TABLE))
    shown = console.file.getvalue()
    told = (TABLE.title, TABLE.note, *TABLE.columns, *(cell for row in TABLE.rows for cell in row))
    assert all(word in shown for cell in told for word in (cell or "-").split())
