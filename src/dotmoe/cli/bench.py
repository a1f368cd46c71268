"""`dotmoe bench DENSE MOE`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from dotmoe.bench import BenchConfig, bench, tables
from dotmoe.cli.parse import parse
from dotmoe.evaluate import gguf_file
from dotmoe.progress import Progress
from dotmoe.tables import to_rich


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchCommand(BenchConfig):
    """Two models, and what to measure on them."""

    json: bool = False
    """Print JSON instead of tables."""


def run(arguments: Sequence[str]) -> None:
    """Measure both models and print them side by side."""
    command = parse(BenchCommand, "bench", arguments)
    command = replace(command, dense=_file(command.dense), moe=_file(command.moe))
    with Progress().bar("bench") as update:
        result = bench(command, update)
    if command.json:
        print(json.dumps(result, indent=2))
    else:
        Console().print(*map(to_rich, tables(result)))


def _file(name: str) -> str:
    """The GGUF in a folder that `dotmoe export` wrote, else what was named."""
    return str(gguf_file(Path(name)) or name)
