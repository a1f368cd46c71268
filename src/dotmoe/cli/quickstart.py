"""`dotmoe quickstart`."""

from collections.abc import Sequence

from rich.console import Console

from dotmoe.cli.parse import parse
from dotmoe.progress import Progress
from dotmoe.quickstart import QuickstartConfig, quickstart
from dotmoe.report import quickstart_summary


def run(arguments: Sequence[str]) -> None:
    """Run the quickstart and print its summary."""
    config = parse(QuickstartConfig, "quickstart", arguments)
    Console().print(quickstart_summary(quickstart(config, Progress())), soft_wrap=True)
