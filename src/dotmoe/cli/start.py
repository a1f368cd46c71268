"""Where a command's options start: a recipe by name, or the config of an earlier run."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import tyro

from dotmoe.config import AnyRunConfig, RunConfig, from_json
from dotmoe.errors import UserError
from dotmoe.recipes import RECIPES, RECOVERY_RECIPES, recipe_named, recovery_recipe_named
from dotmoe.recovery_config import RecoveryConfig

Config = TypeVar("Config", bound=AnyRunConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class Starts(Generic[Config]):
    """The starts that there are for one kind of run."""

    cls: type[Config]
    recipes: Mapping[str, Callable[[], Config]]
    recipe_named: Callable[[str], Config]
    usual: str
    """Recipe where none is named."""
    source: str
    """Field that says what the run is made of, which a recipe may leave to the user."""


CONVERSIONS = Starts(
    cls=RunConfig, recipes=RECIPES, recipe_named=recipe_named, usual="default", source="model"
)
RECOVERIES = Starts(
    cls=RecoveryConfig,
    recipes=RECOVERY_RECIPES,
    recipe_named=recovery_recipe_named,
    usual="sft",
    source="run",
)


def started(
    arguments: Sequence[str], command: str, starts: Starts[Config]
) -> tuple[Config, list[str], str]:
    """Config that --recipe or --config names, the other arguments, and a note for the help.

    Args:
        arguments: What follows the command.
        command: Its name.
        starts: What can be named.

    Raises:
        UserError: Both are named, or one that does not exist.
    """
    start = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    start.add_argument("--recipe", default=None)
    start.add_argument("--config", type=Path, default=None)
    try:
        chosen, rest = start.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(f"{error}. See dotmoe {command} --help.") from error
    if chosen.recipe and chosen.config:
        raise UserError("--recipe and --config both name a start. Give one of them.")
    if chosen.config:
        default = from_json(chosen.config, starts.cls)
    else:
        default = starts.recipe_named(chosen.recipe or starts.usual)
        made_of = getattr(default, starts.source) or tyro.MISSING
        default = replace(default, **{starts.source: made_of, "out": tyro.MISSING})
    notes = (
        f"Start from --recipe NAME ({', '.join(starts.recipes)}) or from --config FILE, the "
        "config.json of an earlier run; options given besides change it."
    )
    return default, rest, notes
