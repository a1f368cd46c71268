"""Tables and numbers as text."""

import io

import pytest
from rich.console import Console

from dotmoe.tables import Table, in_bytes, to_latex, to_markdown, to_rich

TABLE = Table(
    title="of [two] models",
    columns=("model", "perplexity"),
    rows=[("dense [a|b]", "14.87"), ("MoE", None)],
    note="lower is [/better]",
)


def test_markdown_aligns_figures_and_escapes_bars() -> None:
    assert to_markdown(TABLE).splitlines() == [
        "of [two] models",
        "",
        "| model | perplexity |",
        "| --- | ---: |",
        r"| dense [a\|b] | 14.87 |",
        "| MoE | - |",
        "",
        "lower is [/better]",
    ]


def test_latex_escapes_what_it_would_read_as_code() -> None:
    table = Table(columns=["a_b", "50 %"], rows=[["R&D \\x{1}", None], ["#1 $2", "~^"]])
    assert to_latex(table).splitlines() == [
        r"\begin{tabular}{lr}",
        r"\hline",
        r"a\_b & 50 \% \\",
        r"\hline",
        r"R\&D \textbackslash{}x\{1\} & - \\",
        r"\#1 \$2 & \~{}\^{} \\",
        r"\hline",
        r"\end{tabular}",
    ]


def test_terminal_shows_brackets_as_they_are() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(to_rich(TABLE))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for text in (TABLE.title, TABLE.note, "dense [a|b]", "14.87"):
        assert text in shown


def test_a_narrow_terminal_wraps_and_loses_no_word() -> None:
    columns = ("format", "runs in", "speed in tokens per second", "memory while it runs",
               "loss above that of the dense")  # fmt: skip
    row = ("gguf_glm4moe", "llama.cpp and others", "12.34 tokens/s", "12.34 GiB of 80", "0.123")
    console = Console(file=io.StringIO(), width=80)
    console.print(to_rich(Table(columns=columns, rows=[row], words=2)))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(word in shown for cell in (*columns, *row) for word in cell.split())


@pytest.mark.parametrize(
    ("amount", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (2**53, "8192.00 TiB")]
)
def test_sizes_at_the_edges(amount: int, text: str) -> None:
    assert in_bytes(amount) == text
