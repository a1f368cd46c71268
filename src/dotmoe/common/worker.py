"""Run an object in a child process, which isolates its memory, its crashes and its output."""

import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any, Self

from dotmoe.common.errors import UserError

_REMEDIES = {
    "SIGKILL": "The system kills a process when memory runs out; choose smaller sizes.",
    "SIGILL": "It was built for another machine; install a build for this one.",
    "SIGABRT": "An assertion failed; it cannot run this.",
}


class WorkerDiedError(UserError):
    """The child process ended before it answered; its output is attached as a note."""


class Worker:
    """Calls the methods of an object in a child process, which ends when the context is left."""

    def __init__(self, target: str, *arguments: Any, name: str, remedy: str = "") -> None:
        """Start the child, which makes the object by calling `target`, a `package.module:name`.

        Errors state that `name` has ended, and `remedy` if the way it ended suggests none.
        """
        self._name, self._remedy = name, remedy
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "dotmoe.common.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self.ask(target, *arguments)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method and return its result; raise its `UserError`, or a `WorkerDiedError`."""
        try:
            self._pipe.send((method, arguments))
            refusal, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._death() from error
        if refusal is not None:
            self.close()
            raise UserError(refusal)
        return value

    def close(self) -> None:
        """End the child and free its memory."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()
        self._output.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _death(self) -> WorkerDiedError:
        code = self._process.wait()
        self._output.seek(0)
        output = self._output.read().decode(errors="replace")
        self.close()
        native = output.partition("Traceback")[0].splitlines()
        reasons = [line for line in native if "GGML_ASSERT" in line or "error" in line.lower()]
        reason = (reasons or output.split("\n")[-2:-1] or ["no output"])[0].strip()
        end = signal.Signals(-code).name if code < 0 else f"status {code}"
        remedy = _REMEDIES.get(end, self._remedy)
        death = WorkerDiedError(f"{self._name} ended with {end} ({reason}). {remedy}".rstrip())
        death.add_note(output)
        return death


def main() -> None:
    """Make the object that the first request names, then call its methods until the pipe closes."""
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    subject: Any = None
    with suppress(EOFError):
        while True:
            name, arguments = pipe.recv()
            refusal, value = None, None
            try:
                if subject is None:
                    subject = pkgutil.resolve_name(name)(*arguments)
                else:
                    value = getattr(subject, name)(*arguments)
            except UserError as error:
                refusal = str(error)
            pipe.send((refusal, value))


if __name__ == "__main__":
    main()
