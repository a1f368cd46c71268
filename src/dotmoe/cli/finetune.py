"""`dotmoe finetune RUN OUT ...`."""

from collections.abc import Sequence
from dataclasses import replace

import tyro
from rich.console import Console

from dotmoe.cli.parse import parse
from dotmoe.cli.start import started
from dotmoe.narration import Narrator
from dotmoe.recipes import RECOVERY_RECIPES, recovery_recipe_named
from dotmoe.recovery import recover
from dotmoe.recovery_config import RecoveryConfig
from dotmoe.report import recovery_summary


def run(arguments: Sequence[str]) -> None:
    """Train, export and measure, and print dense, converted and finetuned side by side."""
    default, rest = started(arguments, RecoveryConfig, recovery_recipe_named, "sft")
    if not default.run:
        default = replace(default, run=tyro.MISSING, out=tyro.MISSING)
    notes = (
        f"Start from --recipe NAME ({', '.join(RECOVERY_RECIPES)}) or from --config FILE, the "
        "config.json of an earlier run; options given besides change it."
    )
    config = parse(RecoveryConfig, "finetune", rest, notes, default=default)
    recovery = recover(config, Narrator())
    if recovery.results:  # the first rank's alone
        Console().print(recovery_summary(recovery.folder), soft_wrap=True)
