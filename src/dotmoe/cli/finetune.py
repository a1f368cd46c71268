"""`dotmoe finetune RUN OUT ...`."""

from collections.abc import Sequence

from rich.console import Console

from dotmoe.cli.parse import parse
from dotmoe.cli.start import RECOVERIES, started
from dotmoe.narration import Narrator
from dotmoe.recovery import recover
from dotmoe.recovery_config import RecoveryConfig
from dotmoe.report import summary


def run(arguments: Sequence[str]) -> None:
    """Train, export and measure, and print dense, converted and finetuned side by side."""
    default, rest, notes = started(arguments, "finetune", RECOVERIES)
    config = parse(RecoveryConfig, "finetune", rest, notes, default=default)
    recovery = recover(config, Narrator())
    if recovery.results:  # the first rank's alone
        Console().print(summary(recovery.folder), soft_wrap=True)
