"""Tables and numbers as text."""

import io

import pytest
from rich.console import Console

from dotmoe.common.tables import (
    Table,
    figure,
    in_bytes,
    in_time,
    millions,
    percent,
    to_markdown,
    to_rich,
)

TABLE = Table(
    title="of [two] models",
    columns=("model", "perplexity, per cent of the dense"),
    rows=[("dense [a|b]", "14.87"), ("MoE, of experts that run", None)],
    note="lower is [/better]",
)


def test_markdown_aligns_figures_and_escapes_bars():
    assert to_markdown(TABLE).splitlines() == [
        "of [two] models",
        "",
        "| model | perplexity, per cent of the dense |",
        "| --- | ---: |",
        r"| dense [a\|b] | 14.87 |",
        "| MoE, of experts that run | - |",
        "",
        "lower is [/better]",
    ]


@pytest.mark.parametrize("width", [80, 34])
def test_a_terminal_shows_brackets_as_they_are_and_a_narrow_one_loses_no_word(width):
    console = Console(file=io.StringIO(), width=width)
    console.print(to_rich(TABLE))
    shown = console.file.getvalue()
    told = (TABLE.title, TABLE.note, *TABLE.columns, *(cell for row in TABLE.rows for cell in row))
    assert all(word in shown for cell in told for word in (cell or "-").split())


@pytest.mark.parametrize(
    ("shown", "value", "text"),
    [
        *((in_bytes, *each) for each in ((0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"))),
        *((in_bytes, *each) for each in ((3 * 2**30, "3.00 GiB"), (2**53, "8192.00 TiB"))),
        *((in_time, *each) for each in ((0.005, "18 s"), (0.5, "30 min"), (12.345, "12.3 h"))),
        *((in_time, *each) for each in ((100, "4.2 days"), (20_000, "2 years"))),
        *((percent, *each) for each in ((0.25, "25 %"), (0.031, "3.1 %"))),
        *((millions, *each) for each in ((3_144_768, "3.14M"), (7e9, "7.00B"))),
        *((figure, *each) for each in ((0.123456, "0.1235"), (None, "-"), (1200, "1,200"))),
        *((figure, *each) for each in (("bfloat16", "bfloat16"), (float("inf"), "-"))),
    ],
)
def test_numbers_are_shown_short(shown, value, text):
    assert shown(value) == text
