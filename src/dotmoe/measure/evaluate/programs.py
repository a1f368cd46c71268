"""Run a program that a model wrote, with limits, and tell whether it comes to its end.

Run as a script, this file is the process of one program, read from stdin. Limits: computing time,
memory, no file written, no network, no other process, Python's standard library alone. They guard
against accidents; nobody has shown that they hold against an attack.
"""

import math
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from tempfile import TemporaryDirectory
from typing import Any

SECONDS = 3
"""Computing time of a program, as in HumanEval's own evaluation."""
WAITED = 30
"""Longest time to wait for a program, in seconds."""
_MOST = {"CPU": SECONDS, "AS": 1 << 30, "FSIZE": 0, "CORE": 0}
"""Limits by the name of the resource: seconds, bytes of memory, of a file and of a core dump."""
_DONE = 86
"""Exit status after the last line of a program, which `sys.exit` in it does not reach."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_REFUSED = ("socket.", "subprocess.", "os.", "shutil.", "ctypes.", "pty.", "fcntl.", "sqlite3.")
"""Beginnings of the events of `sys.audit` that end a program with an error."""
_LOOKS = ("os.listdir", "os.scandir", "os.walk", "os.fwalk")


def passes(program: str) -> bool:
    """Whether a program comes to its end without an exception and within the limits."""
    with TemporaryDirectory() as folder, suppress(subprocess.TimeoutExpired):
        child = subprocess.run(
            [sys.executable, "-I", "-S", os.path.abspath(__file__)],
            input=program.encode(errors="replace"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            timeout=WAITED,
            check=False,
        )
        return child.returncode == _DONE
    return False


class CodeEval:
    """The metric `code_eval` of the package evaluate, which would download its code."""

    def compute(
        self, references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int]
    ) -> tuple[dict[str, float], None]:
        """pass@k: mean chance that one of k answers passes the test, drawn from those given."""
        missed = dict.fromkeys(k, 0.0)
        for test, answers in zip(references, predictions, strict=True):
            wrong = len([answer for answer in answers if not passes(f"{answer}\n{test}")])
            for each in k:
                missed[each] += math.comb(wrong, each) / math.comb(len(answers), each)
        return {f"pass@{each}": 1 - missed[each] / len(references) for each in k}, None


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        refused = bool(arguments[2] & _WRITES)
    else:
        refused = event.startswith(_REFUSED) and event not in _LOOKS
    if refused:
        raise PermissionError(event)


if __name__ == "__main__":
    source = sys.stdin.read()
    for name, most in _MOST.items():
        with suppress(ValueError, OSError):  # macOS has no limit of memory
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
    sys.addaudithook(_refuse)
    exec(source, {})
    os._exit(_DONE)
