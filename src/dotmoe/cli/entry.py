"""`dotmoe COMMAND ...`: find and run the command, and turn every foreseeable error into one line.

A line is parsed before the machinery is imported, so that help and errors appear at once: PyTorch
takes seconds to load. Options live in modules named `config`, which do not import it.
"""

import ctypes
import errno
import io
import logging
import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dotmoe import __version__
from dotmoe.cli.help import overview
from dotmoe.cli.table import COMMANDS
from dotmoe.common.errors import Interrupted, RankError, UserError, nearest, one_line
from dotmoe.common.files import LOCK
from dotmoe.common.interrupts import interrupts_kept


def main() -> None:
    """Entry point of the `dotmoe` command."""
    with suppress(AttributeError, TypeError):  # glibc, else: clearing its pages takes time
        options = ctypes.CDLL(None)
        options.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: reuse freed blocks of up to 32 MiB
        options.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD: keep up to 1 GiB of them
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # after `run`: torchrun sends it to exiting ranks
    status = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except OSError as error:  # such as a full disk behind a redirection
        _fail(message_of(error) or str(error))
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = status or UserError.exit_code
    sys.exit(status)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit status instead of exiting."""
    _replace_letters_that_the_terminal_lacks()
    name = arguments[0] if arguments else "--help"
    try:
        with interrupts_kept():
            _dispatch(name, arguments[1:])
    except UserError as error:
        _fail(str(error), only_here=isinstance(error, RankError))
        return error.exit_code
    except KeyboardInterrupt as stop:
        event = str(stop) or "interrupted. What is finished is kept"
        _fail(f"{event}; the same command goes on from there.")
        number = stop.signum if isinstance(stop, Interrupted) else signal.SIGINT
        return 128 + number
    except BrokenPipeError:  # the reader closed the pipe: it has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        message = message_of(error, name)
        if message is None:
            raise
        _fail(message)
        return UserError.exit_code
    return 0


def _replace_letters_that_the_terminal_lacks() -> None:
    """Print question marks for what the encoding of the terminal or pipe has no letter for."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def _dispatch(name: str, words: Sequence[str]) -> None:
    """Do what a line asks for: a command, its help, or that of all."""
    if name == "help" and words:
        name, words = words[0], ("--help",)
    if name in ("help", "-h", "--help", "--help-all"):
        print(overview())
    elif name == "--version":
        print(f"dotmoe {__version__}")
    elif name in COMMANDS:
        _run_command(name, words)
    else:
        names = ", ".join(COMMANDS)
        hint = nearest(name, COMMANDS)
        raise UserError(f"unknown command {name}. Commands: {names}.{hint}")


def _run_command(name: str, words: Sequence[str]) -> None:
    from dotmoe.cli.arguments import as_typed, config_of

    logging.basicConfig(format="%(levelname)s: %(message)s", handlers=[_ToStandardError()])
    try:
        config = config_of(name, words)
        from dotmoe.cli import commands
        from dotmoe.common.distributed import require_one_process
        from dotmoe.common.progress import warnings_once
        from dotmoe.models.stock import quiet_transformers

        if not COMMANDS[name].is_shared:
            require_one_process(f"dotmoe {name}")
        with quiet_transformers(), warnings_once():
            getattr(commands, f"run_{name}")(config)
    except UserError as error:
        error.args = (as_typed(str(error), name, words),)
        raise


class _ToStandardError(logging.Handler):
    """Prints to what standard error is then: a progress bar puts lines above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        print(self.format(record), file=sys.stderr)


def _fail(message: str, *, only_here: bool = False) -> None:
    """Print an error; only rank zero prints one that all ranks of torchrun know of."""
    if only_here or os.environ.get("RANK", "0") == "0":
        print(f"dotmoe: error: {one_line(message)}", file=sys.stderr, flush=True)


def _said_of(cause: BaseException) -> str:
    """A failure of the system with its file; a lock stands for the folder that it is in."""
    if not isinstance(cause, OSError) or cause.filename is None:
        return str(cause)
    path = Path(os.fsdecode(cause.filename))
    if path.name == LOCK or (path.name.startswith(".") and path.suffix == LOCK):
        path = path.parent
    return f"{path}: {cause.strerror}"


_LESS_MEMORY = {
    "finetune": "Lower --micro-batch-size or --seq-len, or set --activation-checkpointing",
    "convert": "Lower --repair-tokens, --calibration-tokens or --seq-len, with --steps "
    "--micro-batch-size, and name another OUT",
    "evaluate": "Lower --window or --max-tokens",
}
"""What lowers the memory of a command."""
_LESS_MEMORY["compare"] = _LESS_MEMORY["convert"]


def message_of(error: Exception, command: str = "") -> str | None:
    """One line for a failure of a command that a user can cause or fix; None for a defect."""
    import torch
    from safetensors import SafetensorError

    text = str(error) or type(error).__name__
    on_gpu = isinstance(error, torch.OutOfMemoryError)
    refused = re.search(r"can(no|')t allocate memory", text, re.IGNORECASE)
    if on_gpu or refused or isinstance(error, MemoryError):
        remedy = _LESS_MEMORY.get(command, "Close other programs")
        if on_gpu:
            return f"out of GPU memory ({text}). {remedy}, or choose --device cpu."
        return f"out of memory ({text}). {remedy}, or get more."
    if not isinstance(error, OSError | SafetensorError | RuntimeError):
        return None
    cause: BaseException | None = error
    while cause is not None:
        # safetensors gives the number of the system's error only in its message
        in_text = re.search(r"os error (\d+)", str(cause))
        number = int(in_text[1]) if in_text else getattr(cause, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            remedy = "Free space, then run the same command again."
            return f"the disk is full ({_said_of(cause)}). {remedy}"
        if number in (errno.EACCES, errno.EPERM, errno.EROFS):
            return f"{_said_of(cause)}. Get permission, or choose another folder."
        if number in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP):
            return f"{_said_of(cause)}. Choose another place."
        cause = cause.__cause__ or cause.__context__
    return None
