"""Where a command's options start: a recipe by name, or the config of an earlier run."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from dotmoe.config import AnyRunConfig, from_json
from dotmoe.errors import UserError

Config = TypeVar("Config", bound=AnyRunConfig)


def started(
    arguments: Sequence[str], cls: type[Config], recipe_named: Callable[[str], Config], usual: str
) -> tuple[Config, list[str]]:
    """The config that `--recipe` or `--config` names, and the arguments that are left.

    Args:
        arguments: What follows the command.
        cls: Its config.
        recipe_named: Gives a recipe by its name.
        usual: Name of the recipe where none is given.

    Raises:
        UserError: Both are given, or what is named is not there.
    """
    start = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    start.add_argument("--recipe", default=None)
    start.add_argument("--config", type=Path, default=None)
    try:
        chosen, rest = start.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(f"{error}. See dotmoe {cls.command} --help.") from error
    if chosen.recipe and chosen.config:
        raise UserError("--recipe and --config both name a start. Give one of them.")
    if chosen.config:
        return from_json(chosen.config, cls), rest
    return recipe_named(chosen.recipe or usual), rest
