"""`dotmoe convert MODEL OUT --data FILE ...`."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import tyro
from rich.console import Console

from dotmoe.cli.parse import parse
from dotmoe.config import RunConfig, from_json
from dotmoe.errors import UserError
from dotmoe.narration import Narrator
from dotmoe.pipeline import convert
from dotmoe.recipes import RECIPES, recipe_named
from dotmoe.report import summary


def run(arguments: Sequence[str]) -> None:
    """Run every stage and print what was lost and gained."""
    start = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    start.add_argument("--recipe", default=None)
    start.add_argument("--config", type=Path, default=None)
    try:
        chosen, rest = start.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(f"{error}. See dotmoe convert --help.") from error
    if chosen.recipe and chosen.config:
        raise UserError("--recipe and --config both name a start. Give one of them.")
    if chosen.config:
        default = from_json(chosen.config)
    else:
        default = recipe_named(chosen.recipe or "default")
        default = replace(default, model=default.model or tyro.MISSING, out=tyro.MISSING)
    notes = (
        f"Start from --recipe NAME ({', '.join(RECIPES)}) or from --config FILE, the config.json "
        "of an earlier run; options given besides change it."
    )
    config = parse(RunConfig, "convert", rest, notes, default=default)
    conversion = convert(config, Narrator())
    Console().print(summary(conversion.folder), soft_wrap=True)
