"""`dotmoe compare MODEL OUT --data FILE --eval-text FILE ...`."""

import dataclasses
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dotmoe.cli.parse import parse
from dotmoe.cli.start import started
from dotmoe.compare import COLUMNS, CompareConfig, cells, compare
from dotmoe.config import RunConfig
from dotmoe.progress import Progress


def run(arguments: Sequence[str]) -> None:
    """Convert by every method and print them side by side."""
    start, rest, notes = started(arguments, "compare", "convert")
    values = {field.name: getattr(start, field.name) for field in dataclasses.fields(RunConfig)}
    default = CompareConfig(**values | {"method": "dot_moe"})
    config = parse(CompareConfig, "compare", rest, notes, default=default)
    summary = compare(config, Progress())
    table = Table(*COLUMNS)
    for row in summary["rows"]:
        table.add_row(*cells(row))
    console = Console()
    console.print(table)
    console.print(Text(f"{', '.join(summary['text'])}: {summary['protocol']}"), soft_wrap=True)
    console.print(Text(f"runs, compare.json, compare.md in {config.out}"), soft_wrap=True)
