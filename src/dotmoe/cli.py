"""`dotmoe COMMAND ...`: parse, call one function, print what it gave."""

import argparse
import errno
import io
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TypeVar

import torch
import tyro
from rich.console import Console
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging
from tyro.conf import Positional

from dotmoe.checkpoint_folder import checkpoint_folder, require_checkpoint
from dotmoe.config import RunConfig, from_json
from dotmoe.device import resolved_device
from dotmoe.errors import UserError
from dotmoe.evaluate import EvaluateConfig, evaluate_checkpoint
from dotmoe.export.record import installed_version
from dotmoe.granularity import ExpertsConfig
from dotmoe.inspection import ExportDtype, RunSize, inspect_model, render, stored_dtype
from dotmoe.load import LoadConfig, dense_config, resolved_dtype
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
    export_dtype: ExportDtype = "source"
    """Dtype of the exported weights, as for convert; `source` keeps the checkpoint's."""
    details: bool = False
    """List what each size of memory and disk is the sum of."""
    json: bool = False
    """Print JSON, always with details, instead of tables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateCommand:
    """What to measure."""

    model: Annotated[Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Dense model, exported checkpoint, or run folder."""
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    load: LoadConfig = field(default_factory=LoadConfig)


def run_convert(arguments: Sequence[str]) -> None:
    """Turn a dense checkpoint into an MoE checkpoint: dotmoe convert MODEL OUT --data FILE ..."""
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
    config = _parse(RunConfig, "convert", rest, default=default, description=notes)
    conversion = convert(config, Narrator())
    Console().print(summary(conversion.folder), soft_wrap=True)


def run_inspect(arguments: Sequence[str]) -> None:
    """Show experts, parameters, memory, time and warnings before any cost: dotmoe inspect MODEL"""
    command = _parse(InspectCommand, "inspect", arguments)
    config, folder = dense_config(command.model)
    family = family_of(config)
    inspection = inspect_model(
        config,
        family,
        command.experts,
        command.run,
        stored=stored_dtype(config, family, folder),
        export_dtype=command.export_dtype,
    )
    if command.json:
        print(json.dumps({"model": command.model, **inspection.as_dict()}, indent=2))
    else:
        Console().print(render(inspection, details=command.details))


def run_evaluate(arguments: Sequence[str]) -> None:
    """Measure the perplexity of a dense or exported model: dotmoe evaluate MODEL --text FILE"""
    command = _parse(EvaluateCommand, "evaluate", arguments)
    local = export_folder(Path(command.model))
    folder = local if local.is_dir() else checkpoint_folder(command.model)
    require_checkpoint(folder)
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
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        _dispatch(arguments)
    except UserError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        _fail("interrupted. What is finished is kept; the same command goes on from there.")
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except torch.OutOfMemoryError as error:
        return _fail(
            f"out of GPU memory ({error}). Lower --micro-batch-size or --seq-len, or give "
            "--activation-checkpointing."
        )
    except (OSError, SafetensorError, RuntimeError) as error:
        message = _trouble_of_the_disk(error)
        if message is None:
            raise
        return _fail(message)
    finally:
        transformers_logging.set_verbosity(verbosity)
    return 0


def _dispatch(arguments: Sequence[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return
    if arguments[0] == "--version":
        print(f"dotmoe {installed_version()}")
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
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            config: Config = tyro.cli(
                cls,
                prog=f"dotmoe {name}",
                description=description,
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


def _help() -> str:
    lines = ["usage: dotmoe COMMAND ...   (dotmoe COMMAND --help shows its options)", ""]
    lines += [f"  {name:<12}{function.__doc__}" for name, function in COMMANDS.items()]
    return "\n".join(lines)


def _fail(message: str) -> int:
    print(f"dotmoe: error: {' '.join(message.split())}", file=sys.stderr)
    return USAGE_ERROR


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _trouble_of_the_disk(error: Exception) -> str | None:
    """What to tell of a write that found no room or no permission; None for any other error."""
    cause: BaseException | None = error
    while cause is not None:
        # safetensors reports the number of the system's error only within its text
        in_text = re.search(r"os error (\d+)", str(cause))
        number = int(in_text[1]) if in_text else getattr(cause, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return f"the disk is full ({cause}). Free space, then run the same command again."
        if number in (errno.EACCES, errno.EPERM, errno.EROFS):
            return f"{cause}. Get permission, or choose another folder."
        cause = cause.__cause__ or cause.__context__
    return None
