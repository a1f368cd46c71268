"""`dotmoe COMMAND ...`: find and run the command, and turn every foreseeable error into one line.

A line is parsed before the machinery is imported, so that help and errors appear at once: PyTorch
takes seconds to load. Options live in modules named `config`, which do not import it.
"""

import ctypes
import errno
import logging
import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import NamedTuple

from dotmoe import __version__
from dotmoe.common.errors import Interrupted, RankError, UserError, nearest, one_line


class Command(NamedTuple):
    """Help text and options of one command in `COMMANDS`."""

    help: str
    common: tuple[str, ...] = ()
    """Options that `--help` shows; `--help-all` shows the others too. Empty: both show all."""
    is_shared: bool = False
    """Whether torchrun's processes share the work; any other command runs in one."""
    recipes: str | None = None
    """The command whose recipes and config files this one starts from."""


_TEXT = ("data", "eval-text", "seq-len")
_TRAINING = ("steps", "batch-size", "micro-batch-size", "lr")
_SPLIT = ("active", "shared", "first-dense-layers")
_START, _MACHINE = ("recipe", "config"), ("dtype", "device")

COMMANDS = {
    "quickstart": Command("Convert the bundled model on Python's standard library, in minutes."),
    "inspect": Command(
        "Show what a conversion would give and cost: parameters, memory, time, disk, warnings.",
        common=(
            *("gpu", "gpus", "train", "finetune-recipe", "json", *_SPLIT, "expert-size"),
            *("steps", "repair", *_START, *_MACHINE),
        ),
        recipes="convert",
    ),
    "convert": Command(
        "Turn a dense checkpoint into an MoE checkpoint.",
        common=("data", *_SPLIT, *_START, *_MACHINE, "time", "eval-text", "format", "method"),
        is_shared=True,
        recipes="convert",
    ),
    "compare": Command(
        "Convert one model by several methods on one budget.",
        common=(
            *("methods", "other-text"),
            *("router-steps", *_TEXT, *_SPLIT, *_START, *_TRAINING, *_MACHINE, "repair"),
        ),
        recipes="convert",
    ),
    "finetune": Command(
        "Train a converted model further, to make up for what the conversion lost.",
        common=(
            *("train", *_TEXT, *_START, *_TRAINING, "lr-router", "kl-weight", *_MACHINE, "format"),
        ),
        is_shared=True,
        recipes="finetune",
    ),
    "export": Command("Write a finished run in another format or with another k."),
    "evaluate": Command(
        "Measure a model: perplexity, benchmark tasks, fidelity to the dense model, samples."
    ),
    "analyse": Command("Measure how evenly tokens use the experts of a finished run."),
    "bench": Command("Compare the speed of a dense model and its MoE."),
    "report": Command("Write one page with everything that was measured on a run."),
}
"""Commands by name; `dotmoe.cli.line` knows their options, `run_NAME` in `commands` runs each."""


def main() -> None:
    """Entry point of the `dotmoe` command."""
    with suppress(AttributeError, TypeError):  # glibc, else: clearing its pages takes time
        options = ctypes.CDLL(None)
        options.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: reuse freed blocks of up to 32 MiB
        options.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD: keep up to 1 GiB of them
    status = run(sys.argv[1:])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it to exiting ranks
    sys.exit(status)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit status instead of exiting."""
    signal.signal(signal.SIGTERM, _stop)
    name = arguments[0] if arguments else "--help"
    try:
        _dispatch(name, arguments[1:])
    except UserError as error:
        _fail(str(error), only_here=isinstance(error, RankError))
        return error.exit_code
    except KeyboardInterrupt as stop:
        event = str(stop) or "interrupted. What is finished is kept"
        _fail(f"{event}; the same command goes on from there.")
        return 128 + (stop.signum if isinstance(stop, Interrupted) else signal.SIGINT)
    except BrokenPipeError:  # the reader closed the pipe: it has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        message = message_of(error)
        if message is None:
            raise
        _fail(message)
        return UserError.exit_code
    return 0


def _dispatch(name: str, arguments: Sequence[str]) -> None:
    if name in ("-h", "--help", "--help-all"):
        lines = ["usage: dotmoe COMMAND ...   (dotmoe COMMAND --help shows its options)", ""]
        print("\n".join(lines + [f"  {n:<12}{command.help}" for n, command in COMMANDS.items()]))
    elif name == "--version":
        print(f"dotmoe {__version__}")
    elif name in COMMANDS:
        from dotmoe.cli.line import Line

        handler, said = logging.StreamHandler(), dict[str, logging.LogRecord]()
        # A command may load a model three times, but warns of it once.
        handler.addFilter(lambda record: said.setdefault(record.getMessage(), record) is record)
        logging.basicConfig(format="%(levelname)s: %(message)s", handlers=[handler])
        config = Line(name, tuple(arguments)).config()
        from dotmoe.cli import commands
        from dotmoe.common.distributed import require_one_process
        from dotmoe.models.stock import quiet_transformers

        if not COMMANDS[name].is_shared:
            require_one_process(f"dotmoe {name}")
        with quiet_transformers():
            getattr(commands, f"run_{name}")(config)
    else:
        names = ", ".join(COMMANDS)
        raise UserError(f"{name} is no command. Commands: {names}.{nearest(name, COMMANDS)}")


def _fail(message: str, *, only_here: bool = False) -> None:
    """Print an error; only rank zero prints one that all ranks of torchrun know of."""
    if only_here or os.environ.get("RANK", "0") == "0":
        print(f"dotmoe: error: {one_line(message)}", file=sys.stderr, flush=True)


def _stop(signum: int, frame: FrameType | None) -> None:
    raise Interrupted(signum, "SIGTERM stopped it. What is finished is kept")


def message_of(error: Exception) -> str | None:
    """One line for a failure that a user can cause or fix; None for a defect."""
    import torch
    from safetensors import SafetensorError

    text, on_gpu = str(error) or type(error).__name__, isinstance(error, torch.OutOfMemoryError)
    refused = re.search(r"can(no|')t allocate memory", text, re.IGNORECASE)
    if on_gpu or refused or isinstance(error, MemoryError):
        remedy = "Lower --micro-batch-size or --seq-len, set --activation-checkpointing"
        memory, other = ("GPU memory", "choose --device cpu") if on_gpu else ("memory", "get more")
        return f"out of {memory} ({text}). {remedy}, or {other}."
    if not isinstance(error, OSError | SafetensorError | RuntimeError):
        return None
    cause: BaseException | None = error
    while cause is not None:
        # safetensors gives the number of the system's error only in its message
        in_text = re.search(r"os error (\d+)", str(cause))
        number = int(in_text[1]) if in_text else getattr(cause, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return f"the disk is full ({cause}). Free space, then run the same command again."
        if number in (errno.EACCES, errno.EPERM, errno.EROFS):
            return f"{cause}. Get permission, or choose another folder."
        if number in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
            return f"{cause}. Choose another place."
        cause = cause.__cause__ or cause.__context__
    return None
