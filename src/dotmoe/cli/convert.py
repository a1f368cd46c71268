"""`dotmoe convert MODEL OUT --data FILE ...`."""

from collections.abc import Sequence

from rich.console import Console

from dotmoe.cli.parse import parse
from dotmoe.cli.start import started
from dotmoe.config import RunConfig
from dotmoe.pipeline import convert
from dotmoe.progress import Progress
from dotmoe.report import summary


def run(arguments: Sequence[str]) -> None:
    """Run every stage and print what was lost and gained."""
    default, rest, notes = started(arguments, "convert", "convert")
    config = parse(RunConfig, "convert", rest, notes, default=default)
    conversion = convert(config, Progress())
    if conversion.results:  # of torchrun's ranks the first has them
        Console().print(summary(conversion.folder), soft_wrap=True)
