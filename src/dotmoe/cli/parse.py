"""A command line -> a config: where it starts, its help, and errors in one line."""

import argparse
import io
import os
import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import fields, replace
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import docstring_parser
import tyro

from dotmoe.cli import COMMANDS
from dotmoe.config import RECIPES, recipe_of
from dotmoe.errors import UserError, nearest
from dotmoe.files import read_json
from dotmoe.options import check, from_values

Config = TypeVar("Config")

_HELP_COLUMNS = 100


class Line(NamedTuple):
    """What was typed after `dotmoe`."""

    name: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(["dotmoe", self.name, *self.arguments])

    def config(self, cls: type[Config], notes: str = "") -> Config:
        """The options as a config that is in range.

        Args:
            cls: A dataclass; names of nested fields must differ, since prefixes are left out.
            notes: What the help says after the command's own line.

        Raises:
            UserError: One line, with the nearest option or choice if there is one.
            SystemExit: After the help.
        """
        command, arguments, start = COMMANDS[self.name], list(self.arguments), None
        if command.recipes:
            start, arguments = self._start(command.recipes)
            values = {field.name: getattr(start, field.name) for field in fields(start)}
            if type(start) is not cls:  # a comparison or a sweep, of what is said for all runs
                values["method"] = "dot_moe"
            start = cls(**values)
            notes = (
                f"Start from --recipe NAME ({', '.join(RECIPES[command.recipes])}) or from "
                "--config FILE, the config.json of an earlier run; options given besides change it."
            )
        asked = next((word for word in arguments if word in ("-h", "--help", "--help-all")), None)
        said, out = io.StringIO(), io.StringIO()
        try:
            columns = {"COLUMNS": str(_HELP_COLUMNS)} if asked else {}
            shown = redirect_stdout(out) if asked else nullcontext()
            texts = patch("docstring_parser.parse_from_object", _attributes_in_one_line)
            with patch.dict(os.environ, columns), texts, redirect_stderr(said), shown:
                config: Config = tyro.cli(
                    cls,
                    prog=f"dotmoe {self.name}",
                    description=f"{command.help} {notes}".strip(),
                    args=["--help"] if asked else arguments,
                    config=(tyro.conf.OmitArgPrefixes,),
                    **({} if start is None else {"default": start}),
                )
        except SystemExit as stop:
            if asked:
                # tyro wraps what it says of options, and leaves the description one line.
                lines = (fill(line, _HELP_COLUMNS) for line in out.getvalue().splitlines())
                text, is_short = "\n".join(lines), asked != "--help-all" and command.common
                print(_short_help(text, command.common) if is_short else text)
                raise
            line = _in_one_line(said.getvalue())
            raise UserError(f"{line} See dotmoe {self.name} --help.") from stop
        check(config)
        return config

    def _start(self, command: str) -> tuple[Any, list[str]]:
        """The config that --recipe or --config names, and the other arguments."""
        start = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        start.add_argument("--recipe")
        start.add_argument("--config", type=Path)
        try:
            chosen, rest = start.parse_known_args(self.arguments)
        except argparse.ArgumentError as error:
            raise UserError(f"{error}. See dotmoe {self.name} --help.") from error
        if chosen.recipe and chosen.config:
            raise UserError("--recipe and --config both name a start. Give one of them.")
        recipe = recipe_of(command, chosen.recipe)
        if chosen.config:
            read = from_values(type(recipe), read_json(chosen.config), str(chosen.config))
            return read, rest
        source = "model" if command == "convert" else "run"
        made_of: Any = getattr(recipe, source) or tyro.MISSING
        return replace(recipe, **{source: made_of, "out": tyro.MISSING}), rest


def _attributes_in_one_line(
    obj: Any, parse: Callable[..., Any] = docstring_parser.parse_from_object
) -> Any:
    """Docstrings of attributes as tyro wraps them well: it keeps line ends before an indent."""
    parsed = parse(obj)
    for attribute in parsed.params:
        attribute.description = " ".join((attribute.description or "").split()) or None
    return parsed


def _short_help(text: str, common: Sequence[str]) -> str:
    """Usage, description and the common options of a command, from its whole help."""
    head, _, rest = text.partition(" positional arguments")
    starts = r"  (--[\w-]+|[A-Z]+(?= |$))"
    found = re.finditer(rf"^{starts}.*(?:\n(?!{starts}|\s*$).+)*", rest, re.MULTILINE)
    blocks = {block[1]: re.sub(r" +$", "", block[0], flags=re.MULTILINE) for block in found}
    names = [name for name in blocks if not name.startswith("--")]
    shown = [blocks[name] for name in (*names, *(f"--{option}" for option in common))]
    number = len(blocks) - len(names) + 1  # with --help
    return "\n".join([head.rstrip(), "", *shown, f"  {'--help-all':<24} show all {number} options"])


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
    near: Sequence[str] = re.findall(r"(?<=\s)--[a-z][\w-]*", offered)
    return f"{text}.{f' Did you mean {near[0]}?' if near else nearest(wrong, choices)}"
