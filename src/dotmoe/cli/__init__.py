"""The `dotmoe` command: `main` is its entry point, `run` the same from Python."""

from dotmoe.cli.entry import main, run
from dotmoe.cli.table import COMMANDS

__all__ = ["COMMANDS", "main", "run"]
