"""`dotmoe sweep MODEL OUT --over-experts 8 16 32 --data FILE --eval-text FILE ...`."""

import dataclasses
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dotmoe.cli.parse import parse
from dotmoe.cli.start import started
from dotmoe.config import RunConfig
from dotmoe.progress import Progress
from dotmoe.sweep import SweepConfig, sweep, tables


def run(arguments: Sequence[str]) -> None:
    """Make every run and print them side by side."""
    start, rest, notes = started(arguments, "sweep", "convert")
    values = {field.name: getattr(start, field.name) for field in dataclasses.fields(RunConfig)}
    default = SweepConfig(**values | {"method": "dot_moe"})
    config = parse(SweepConfig, "sweep", rest, notes, default=default)
    summary = sweep(config, Progress())
    console = Console()
    for made in tables(summary):
        table = Table(*made.columns)
        for row in made.rows:
            table.add_row(*row)
        console.print(table)
    console.print(Text(f"{', '.join(summary['text'])}: {summary['protocol']}"), soft_wrap=True)
    console.print(Text(f"runs, sweep.json, sweep.md in {config.out}"), soft_wrap=True)
