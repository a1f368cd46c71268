"""`dotmoe finetune RUN OUT`."""

from collections.abc import Sequence

from rich.console import Console

from dotmoe.cli.parse import parse
from dotmoe.cli.start import started
from dotmoe.config import FinetuneRunConfig
from dotmoe.pipeline import finetune
from dotmoe.progress import Progress
from dotmoe.report import summary


def run(arguments: Sequence[str]) -> None:
    """Run every stage and print what was lost and gained."""
    default, rest, notes = started(arguments, "finetune", "finetune")
    config = parse(FinetuneRunConfig, "finetune", rest, notes, default=default)
    conversion = finetune(config, Progress())
    if conversion.results:  # rank zero's alone
        Console().print(summary(conversion.folder), soft_wrap=True)
