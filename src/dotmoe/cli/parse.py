"""Command-line options from a config dataclass, with errors in one line."""

import io
import re
from collections.abc import Sequence
from contextlib import redirect_stderr
from difflib import get_close_matches
from typing import Any, TypeVar

import tyro

from dotmoe.cli import COMMANDS
from dotmoe.errors import UserError

Config = TypeVar("Config")


def parse(
    cls: type[Config], name: str, arguments: Sequence[str], notes: str = "", **options: Any
) -> Config:
    """Options of a command as its config.

    Args:
        cls: A dataclass; names of nested fields must differ, since prefixes are left out.
        name: The command.
        arguments: What follows it on the command line.
        notes: What `--help` says after the command's own line.
        options: Further arguments of `tyro.cli`.

    Raises:
        UserError: One line, with the nearest option or choice if there is one.
        SystemExit: After `--help`.
    """
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            config: Config = tyro.cli(
                cls,
                prog=f"dotmoe {name}",
                description=f"{COMMANDS[name]} {notes}",
                args=list(arguments),
                config=(tyro.conf.OmitArgPrefixes,),
                **options,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(f"{_in_one_line(said.getvalue())} See dotmoe {name} --help.") from stop
    return config


def _in_one_line(box: str) -> str:
    r"""The first section of tyro's boxed error, with the nearest option or choice if there is one.

    Example:
        >>> _in_one_line("│ Unrecognized options: --stpes │\n│ ─ │\n│ Perhaps you meant: --steps │")
        'Unrecognized options: --stpes. Did you mean --steps?'
    """
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip("│ ") for line in box.splitlines()]
    sections = " ".join(line for line in lines if not line.startswith(("╭", "╰"))).split(" ─")
    text = sections[0].strip().rstrip(".")
    offered = next((s for s in sections if "Perhaps you meant" in s), "")
    wrong, *choices = re.findall(r"'([^']*)'", text) or [""]
    near = re.findall(r"(?<=\s)--[a-z][\w-]*", offered) or get_close_matches(wrong, choices, n=1)
    return f"{text}. Did you mean {near[0]}?" if near else f"{text}."
