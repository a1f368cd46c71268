"""What a command starts from: its class of options, and a recipe or the config file of a run.

Nothing here imports PyTorch, which takes seconds to load.
"""

from collections.abc import Collection
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from dotmoe.cli.options import Option, options_of
from dotmoe.cli.table import COMMANDS
from dotmoe.common.errors import UserError
from dotmoe.common.files import DamagedError, read_json
from dotmoe.common.options import built, changed, flat, from_values, without_effect
from dotmoe.measure import config as measuring
from dotmoe.run import config as running
from dotmoe.run.config import RECIPES, RunConfig, recipe_of

Config = TypeVar("Config")

CONFIGS = {
    "quickstart": running.QuickstartConfig,
    "inspect": measuring.InspectConfig,
    "convert": running.RunConfig,
    "compare": running.CompareConfig,
    "finetune": running.FinetuneRunConfig,
    "export": running.ReexportConfig,
    "evaluate": measuring.EvaluateConfig,
    "analyse": measuring.AnalyseConfig,
    "bench": measuring.BenchConfig,
    "report": measuring.ReportConfig,
}
"""The class of each command's options."""
_DECIDES_DEFAULTS = {
    "active",
    "active_experts",
    "experts",
    "expert_size",
    "keep",
    "shared",
    "targets",
    "method",
    "format",
}
"""Options from which values of others follow, as they do from the model."""


class Start(NamedTuple):
    """What a command starts from: a recipe, or a config file."""

    config: Any
    """One of the command's class; None if it has no recipes."""
    named: dict[str, str]
    """Arguments that it names."""
    unused: tuple[str, ...] = ()
    """Options that somebody wrote into the file, and that have no effect by themselves."""


@lru_cache
def command_options(command: str) -> tuple[Option, ...]:
    """All options of a command, those of its arguments and of its start first."""
    return with_start(command, tuple(options_of(CONFIGS[command])))


def with_start(command: str, options: tuple[Option, ...]) -> tuple[Option, ...]:
    """Options of a command's config, with --recipe and --config if it has recipes."""
    recipes = COMMANDS[command].recipes
    if recipes is None:
        return options
    common: dict[str, Any] = {"group": "", "takes_many": False, "is_required": False}
    recipe = Option(
        "recipe",
        kinds=(str,),
        is_optional=False,
        default=None,
        help=f"Settings to start from: {', '.join(RECIPES[recipes])}. Other options override them.",
        word="NAME",
        **common,
    )
    file = recipe._replace(
        name="config",
        kinds=(Path,),
        help="config.json of an earlier run to start from, instead of a recipe.",
        word="FILE",
    )
    arguments = tuple(each for each in options if each.is_argument)
    return (*arguments, recipe, file, *(each for each in options if not each.is_argument))


def start_of(command: str, given: dict[str, Any]) -> Start:
    """What --recipe or --config gives a command to start from."""
    recipes = COMMANDS[command].recipes
    if recipes is None:
        return Start(None, {})
    if "recipe" in given and "config" in given:
        raise UserError("--recipe and --config both name a starting config. Give one of them.")
    unused = tuple[str, ...]()
    if "config" in given:
        start, unused = _of_file(command, recipes, given)
    else:
        start = recipe_of(recipes, given.get("recipe"))
    values = {field.name: getattr(start, field.name) for field in fields(start)}
    named = {name: values[name] for name in ("model", "run", "out") if values.get(name)}
    if command == "compare":  # the method comes from the options of its runs
        values["method"] = "dot_moe"
    if command == "inspect":
        values["out"] = ""
    return Start(CONFIGS[command](**values), named, unused)


def with_open_defaults(config: Any, start: Start, given: Collection[str]) -> Any:
    """The config with what nobody gave open again, if what it followed from is another now.

    A repeat of a run keeps the values of the run.
    """
    if not isinstance(config, RunConfig) or not config.followed:
        return config
    followed = [name for name in config.followed if name not in given]
    is_repeat = _DECIDES_DEFAULTS.isdisjoint(given) and config.model == start.config.model
    if is_repeat:
        return replace(config, followed=tuple(followed))
    plain = flat(recipe_of("convert", None))
    return built(type(config), config, {name: plain[name] for name in (*followed, "followed")})


def _of_file(command: str, recipes: str, given: dict[str, Any]) -> tuple[Any, tuple[str, ...]]:
    """The config in the file of --config, and its options that have no effect there."""
    (option,) = [each for each in command_options(command) if each.name == "config"]
    file = option.value(given["config"])
    config = _config_in(file, type(recipe_of(recipes)))
    by_hand = _written_by_hand(file, config, recipes)
    unused = tuple(name for name, _ in without_effect(config, by_hand))
    if isinstance(config, RunConfig):  # its repair is the one that the time allowed
        _require_repair_of_time(given, config, by_hand)
        followed = tuple(name for name in config.followed if name not in by_hand)
        config = replace(config, time=None, followed=followed)
    return config, unused


def _config_in(file: Path, cls: type[Config]) -> Config:
    try:
        return from_values(cls, read_json(file), str(file))
    except DamagedError as error:
        raise UserError(f"{error}. Name the config.json of a run.") from error


def _require_repair_of_time(given: dict[str, Any], start: RunConfig, by_hand: set[str]) -> None:
    """Refuse a time that somebody wrote into a config file, since it chooses no repair there."""
    is_chosen = not by_hand.isdisjoint(flat(start.repairing))
    if start.time and "time" in by_hand and not is_chosen and "time" not in given:
        option = f"time in {given['config']}"
        raise UserError(
            f"{option} is {start.time}, but a repair is chosen by --time alone. "
            f"Give --time {start.time}, or leave {option} out."
        )


def _written_by_hand(file: Path, config: Any, recipes: str) -> set[str]:
    """Options that somebody wrote into a config file.

    They differ from those of the run beside it, whose command line was checked; of a file without a
    run, from the recipe or defaults that the file is most like.
    """
    of_run = _config_of_run_beside(file, type(config))
    if of_run is not None:
        return changed(config, of_run)
    starts = (None, *RECIPES[recipes].values())
    return min((changed(config, start) for start in starts), key=len)


def _config_of_run_beside(file: Path, cls: type[Config]) -> Config | None:
    """The config of the run beside a file; None if there is no run, or none that can be read."""
    manifest = file.with_name("manifest.json")
    try:
        values = read_json(manifest).get("config")
        return from_values(cls, values, str(manifest))
    except UserError:
        return None
