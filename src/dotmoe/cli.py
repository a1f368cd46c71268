"""`dotmoe COMMAND ...`: parse, call one function, print what it gave."""

import argparse
import errno
import json
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import tyro
from rich.console import Console
from transformers.utils import logging as transformers_logging
from tyro.conf import Positional

from dotmoe.checkpoint_folder import checkpoint_folder
from dotmoe.config import RunConfig, from_json
from dotmoe.errors import UserError
from dotmoe.evaluate import EvaluateConfig, evaluate_checkpoint
from dotmoe.granularity import ExpertsConfig
from dotmoe.inspection import RunSize, inspect_model, render
from dotmoe.load import LoadConfig, dense_config, resolved_device, resolved_dtype
from dotmoe.models.family import family_of
from dotmoe.narration import Narrator
from dotmoe.pipeline import convert
from dotmoe.quickstart import QuickstartConfig, quickstart
from dotmoe.recipes import RECIPES, recipe_named
from dotmoe.report import quickstart_summary, summary
from dotmoe.run_folder import export_folder

USAGE_ERROR = 2
INTERRUPTED = 130

Config = TypeVar("Config")


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectCommand:
    """What to look at before paying for a conversion."""

    model: Positional[str]
    """Local folder or hub name of the dense model; `embedded` is the one that comes along."""
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    run: RunSize = field(default_factory=RunSize)
    json: bool = False
    """Print JSON instead of tables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateCommand:
    """What to measure."""

    model: Positional[str]
    """Dense model, exported checkpoint, or run folder."""
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    load: LoadConfig = field(default_factory=LoadConfig)


def run_convert(arguments: Sequence[str]) -> None:
    """Turn a dense checkpoint into an MoE checkpoint: dotmoe convert MODEL OUT --data FILE ..."""
    start = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    start.add_argument("--recipe", default=None)
    start.add_argument("--config", type=Path, default=None)
    chosen, rest = start.parse_known_args(arguments)
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
    config = _parse(RunConfig, "convert", rest, default=default, description=notes)
    conversion = convert(config, Narrator())
    Console().print(summary(conversion.folder), soft_wrap=True)


def run_inspect(arguments: Sequence[str]) -> None:
    """Show experts, parameters, memory, time and warnings before any cost: dotmoe inspect MODEL"""
    command = _parse(InspectCommand, "inspect", arguments)
    config, _ = dense_config(command.model)
    inspection = inspect_model(config, family_of(config), command.experts, command.run)
    if command.json:
        print(json.dumps(inspection.as_dict(), indent=2))
    else:
        Console().print(render(inspection))


def run_evaluate(arguments: Sequence[str]) -> None:
    """Measure the perplexity of a dense or exported model: dotmoe evaluate MODEL --text FILE"""
    command = _parse(EvaluateCommand, "evaluate", arguments)
    local = export_folder(Path(command.model))
    folder = local if local.is_dir() else checkpoint_folder(command.model)
    device = resolved_device(command.load.device)
    with Narrator().bar("evaluate") as update:
        result = evaluate_checkpoint(
            folder,
            command.evaluate,
            device=device,
            dtype=resolved_dtype(command.load.dtype, device),
            on_progress=update,
        )
    print(json.dumps(result.as_dict(), indent=2))


def run_quickstart(arguments: Sequence[str]) -> None:
    """Convert the small model that comes along, on this machine's own text, in minutes."""
    config = _parse(QuickstartConfig, "quickstart", arguments)
    result = quickstart(config, Narrator())
    Console().print(quickstart_summary(result), soft_wrap=True)


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "quickstart": run_quickstart,
    "inspect": run_inspect,
    "convert": run_convert,
    "evaluate": run_evaluate,
}


def main() -> None:
    """Entry point of the `dotmoe` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit status instead of leaving."""
    signal.signal(signal.SIGTERM, _interrupt)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    transformers_logging.disable_progress_bar()
    try:
        _dispatch(arguments)
    except UserError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        _fail("interrupted. What is finished is kept; the same command goes on from there.")
        return INTERRUPTED
    except torch.OutOfMemoryError as error:
        return _fail(
            f"out of GPU memory ({error}). Lower --micro-batch-size or --seq-len, or give "
            "--activation-checkpointing."
        )
    except Exception as error:
        if _is_disk_full(error):
            return _fail(
                f"the disk is full ({error}). Free space, then run the same command again."
            )
        raise
    return 0


def _dispatch(arguments: Sequence[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return
    if arguments[0] == "--version":
        print(f"dotmoe {version('dotmoe')}")
        return
    name = arguments[0]
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UserError(f"{name} is no command. Commands: {', '.join(COMMANDS)}.{hint}")
    COMMANDS[name](arguments[1:])


def _parse(cls: type[Config], name: str, arguments: Sequence[str], **options: Any) -> Config:
    function = COMMANDS[name]
    description = f"{function.__doc__} {options.pop('description', '')}"
    config: Config = tyro.cli(
        cls,
        prog=f"dotmoe {name}",
        description=description,
        args=list(arguments),
        config=(tyro.conf.OmitArgPrefixes,),
        **options,
    )
    return config


def _help() -> str:
    lines = ["usage: dotmoe COMMAND ...   (dotmoe COMMAND --help shows its options)", ""]
    lines += [f"  {name:<12}{function.__doc__}" for name, function in COMMANDS.items()]
    return "\n".join(lines)


def _fail(message: str) -> int:
    print(f"dotmoe: error: {' '.join(message.split())}", file=sys.stderr)
    return USAGE_ERROR


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _is_disk_full(error: Exception) -> bool:
    number = getattr(error, "errno", None)
    return number in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error)
