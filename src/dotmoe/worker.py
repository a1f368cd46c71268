"""An object in a process of its own: its memory, its crashes and its output stay there.

Parent and child exchange pickles over pipes; what libraries print goes to a file.
"""

import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from itertools import takewhile
from typing import Any, Self

from dotmoe.errors import UserError

_REMEDIES = {"SIGKILL": "The system kills a process when memory runs out; choose smaller sizes."}


class WorkerDiedError(UserError):
    """The child ended before it answered; its output is attached as a note."""


class Worker:
    """Calls the methods of an object in a child process; a context manager that ends the child."""

    def __init__(
        self,
        target: str,
        *arguments: Any,
        name: str,
        threads: int | None = None,
        remedies: Mapping[str, str] | None = None,
    ) -> None:
        """Start the child and make the object.

        Args:
            target: What to call for the object, as `package.module:name`.
            arguments: Its arguments.
            name: What an error says has ended, such as `llama.cpp on model.gguf`.
            threads: Threads of OpenMP; None: those of this process.
            remedies: A sentence for the user by name of a signal, and by "" for any other end.

        Raises:
            UserError: As `ask`.
        """
        self._name, self._remedies = name, _REMEDIES | dict(remedies or {})
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "dotmoe.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment,
        )
        self.ask(target, *arguments)

    def ask(self, method: str, *arguments: Any) -> Any:
        """The result of a method.

        Raises:
            UserError: The object raised one.
            WorkerDiedError: The child ended, by a signal or another exception.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump((method, arguments), self._process.stdin)
            self._process.stdin.flush()
            refusal, value = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
            raise self._death() from error
        if refusal is not None:
            self.close()
            raise UserError(refusal)
        return value

    def close(self) -> None:
        """End the child and give its memory back."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()
        self._stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _death(self) -> WorkerDiedError:
        code = self._process.wait()
        self._stderr.seek(0)
        output = self._stderr.read().decode(errors="replace")
        self.close()
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        native = takewhile(lambda line: not line.startswith("Traceback"), lines)
        reasons = [line for line in native if "GGML_ASSERT" in line or "error" in line.lower()]
        said = (reasons or lines[-1:] or ["no output"])[0]
        end = signal.Signals(-code).name if code < 0 else f"status {code}"
        remedy = self._remedies.get(end, self._remedies.get("", ""))
        error = WorkerDiedError(f"{self._name} ended with {end} ({said}). {remedy}".rstrip())
        error.add_note(output)
        return error


def main() -> None:
    """Make an object as the first request says, then call its methods until the input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    made: Any = None
    while True:
        try:
            name, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: tuple[str | None, Any]
        try:
            if made is None:
                module, _, name = name.partition(":")
                made, value = getattr(importlib.import_module(module), name)(*arguments), None
            else:
                value = getattr(made, name)(*arguments)
            answer = None, value
        except UserError as error:
            answer = str(error), None
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
