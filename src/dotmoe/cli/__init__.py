"""`dotmoe COMMAND ...`: find the command, run it, and turn every foreseeable failure into a line.

Each command is a module of this package. It is imported when it is called, so that help comes at
once and an interrupt is caught from the first moment.
"""

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from types import FrameType

from dotmoe.errors import Interrupted, RankError, UserError

USAGE_ERROR = 2
INTERRUPTED = 130

COMMANDS = {
    "quickstart": "Convert the small model that comes along, on this machine's own text.",
    "inspect": "Show experts, parameters, memory, time and warnings before any cost.",
    "convert": "Turn a dense checkpoint into an MoE checkpoint.",
    "compare": "Convert one model by several methods on the same budget, side by side.",
    "sweep": "Convert one model several times with one thing changed: E, k, start or method.",
    "finetune": "Train a converted model further, to make up for what the conversion lost.",
    "export": "Write what a finished run has learned in another format, or with another k.",
    "edit": "Change how many experts an exported model runs per token, in place.",
    "evaluate": "Measure a model: perplexity, benchmark tasks, fidelity to the dense one, samples.",
    "analyse": "Look into a finished run: load and overlap of experts, their outputs, costs.",
    "bench": "Compare the speed and memory of a dense model and its MoE.",
    "report": "Put all that was measured of a run into one page with plots.",
}


def main() -> None:
    """Entry point of the `dotmoe` command."""
    status = run(sys.argv[1:])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, to ranks that are leaving anyway
    sys.exit(status)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit status instead of leaving."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        _dispatch(arguments)
    except UserError as error:
        _fail(str(error), only_here=isinstance(error, RankError))
        return error.exit_code
    except Interrupted as stop:
        _fail(f"{stop}; the same command goes on from there.")
        return 128 + stop.signum
    except KeyboardInterrupt:
        _fail("interrupted. What is finished is kept; the same command goes on from there.")
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        from dotmoe.cli.failures import message_of

        message = message_of(error)
        if message is None:
            raise
        return _fail(message)
    return 0


def _dispatch(arguments: Sequence[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return
    name, *rest = arguments
    if name == "--version":
        from dotmoe.export.record import installed_version

        print(f"dotmoe {installed_version()}")
        return
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UserError(f"{name} is no command. Commands: {', '.join(COMMANDS)}.{hint}")
    from dotmoe.cli.failures import quiet_libraries

    with quiet_libraries():
        importlib.import_module(f"dotmoe.cli.{name}").run(rest)


def _help() -> str:
    lines = ["usage: dotmoe COMMAND ...   (dotmoe COMMAND --help shows its options)", ""]
    lines += [f"  {name:<12}{text}" for name, text in COMMANDS.items()]
    return "\n".join(lines)


def _fail(message: str, *, only_here: bool = False) -> int:
    """Print a failure; one that all ranks of torchrun know of is told by the first alone."""
    is_first = os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"
    if is_first or only_here:
        print(f"dotmoe: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return USAGE_ERROR


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
