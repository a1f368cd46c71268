"""Where a command's options start: a recipe by name, or the config of an earlier run."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tyro

from dotmoe.config import FinetuneRunConfig, RunConfig
from dotmoe.errors import UserError
from dotmoe.files import read_json
from dotmoe.options import from_values
from dotmoe.recipes import RECIPES, recipe_of


def started(arguments: Sequence[str], command: str, kind: str) -> tuple[Any, list[str], str]:
    """Config that --recipe or --config names, the other arguments, and a note for the help.

    Args:
        arguments: What follows the command.
        command: Its name.
        kind: The command whose recipes and configs it takes: convert or finetune.

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
    cls = RunConfig if kind == "convert" else FinetuneRunConfig
    default: Any
    if chosen.config:
        default = from_values(cls, read_json(chosen.config), str(chosen.config))
    else:
        default = recipe_of(kind, chosen.recipe)
        source = "model" if kind == "convert" else "run"
        made_of = getattr(default, source) or tyro.MISSING
        default = replace(default, **{source: made_of, "out": tyro.MISSING})
    notes = (
        f"Start from --recipe NAME ({', '.join(RECIPES[kind])}) or from --config FILE, the "
        "config.json of an earlier run; options given besides change it."
    )
    return default, rest, notes
