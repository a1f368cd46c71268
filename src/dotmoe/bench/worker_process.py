"""The parent's end of a worker."""

import os
import pickle
import subprocess
import sys
import tempfile
from typing import Any

from dotmoe.bench.points import LoadedModel, Point, WorkerSetup
from dotmoe.errors import UserError

_KILLED = -9
_CRASHES = (-4, -11)
"""Illegal instruction, and access to memory that there is not."""


class WorkerProcess:
    """A `Runner` in a process of its own; a context manager that ends the process."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": str(setup.threads),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dotmoe.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=environment,
        )

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._said.close()

    def load(self) -> LoadedModel:
        """See `Runner.load`."""
        self._exchange(self._setup)
        loaded: LoadedModel = self._exchange(("load", ()))
        return loaded

    def prepare(self, point: Point) -> float | None:
        """See `Runner.prepare`."""
        touched: float | None = self._exchange(("prepare", (point,)))
        return touched

    def run(self) -> list[float]:
        """See `Runner.run`."""
        seconds: list[float] = self._exchange(("run", ()))
        return seconds

    def finish(self) -> int:
        """See `Runner.finish`."""
        peak: int = self._exchange(("finish", ()))
        return peak

    def _exchange(self, request: Any) -> Any:
        """Send a request, wait for its answer.

        Raises:
            UserError: The worker refuses, or the system ended it for want of memory.
            RuntimeError: It failed; with its traceback.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump(request, self._process.stdin)
            self._process.stdin.flush()
            kind, value = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError) as error:
            raise self._death() from error
        if kind == "refused":
            raise UserError(value)
        if kind == "failed":
            raise RuntimeError(f"the process that measures {self._setup.path} failed:\n{value}")
        return value

    def _death(self) -> Exception:
        status = self._process.wait()
        if status == _KILLED:
            return UserError(
                f"the process that measures {self._setup.path} was killed, as the system does when "
                "memory runs out. Lower batch_sizes or context_tokens, or choose a smaller model."
            )
        if status in _CRASHES and self._setup.repack:
            return UserError(
                f"{self._setup.runtime} crashed on {self._setup.path} (signal {-status}). "
                "Measure without --llama-cpp-repack."
            )
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip()
        return RuntimeError(
            f"the process that measures {self._setup.path} ended with status {status}:\n{said}"
        )
