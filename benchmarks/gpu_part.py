"""Shared by the parts of `gpu.py`: measurements within a limit of time, written one by one."""

import argparse
import gc
import json
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dotmoe.common.errors import one_line
from dotmoe.common.files import read_json
from dotmoe.run.folder import RESULTS, STAGES, RunFolder
from rounds import keep

Measure = Callable[[], dict[str, Any]]
"""A measurement; it returns JSON values."""
LEAST_SECONDS = 3
"""A measurement that has less time than this is left out."""


class Asked(NamedTuple):
    """What a part is asked for."""

    out: Path
    """Folder of the results."""
    files: Path | None
    """Folder of the model, the texts and the questions of the part `real`."""
    scratch: Path
    """Folder for runs and checkpoints."""
    seconds: float
    """Longest time of the part."""
    device: str
    tiny: bool
    """Whether this is a rehearsal, with tiny models."""


def asked(about: str | None) -> Asked:
    """The options of a part's command line."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder for the results")
    parser.add_argument("--files", type=Path, help="folder of model, texts and questions")
    parser.add_argument("--scratch", type=Path, default=Path("build/gpu-scratch"))
    parser.add_argument("--seconds", type=float, default=230, help="longest time of the part")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal with tiny models")
    found = Asked(**vars(parser.parse_args()))
    for folder in (found.out, found.scratch):
        folder.mkdir(parents=True, exist_ok=True)
    return found


class Part:
    """Results of a part, in one JSON file that is whole after every measurement."""

    def __init__(self, name: str, asked: Asked) -> None:
        self._file = asked.out / f"{name}.json"
        self._ends = time.monotonic() + asked.seconds
        self._tiny = asked.tiny
        self._found: dict[str, Any] = {"tiny": asked.tiny}

    @property
    def left(self) -> float:
        """Seconds that are left to the part."""
        return self._ends - time.monotonic()

    def measure(self, name: str, make: Measure, most: float) -> dict[str, Any] | None:
        """Result of a measurement of at most so many seconds; None if it fails.

        Result or error, and the seconds that it took, are written at once. Limits are those of a
        GPU, so in a rehearsal a measurement may take what is left to the part.
        """
        limit, started, result = self.left, time.monotonic(), None
        if not self._tiny:
            limit = min(most, limit)
        if limit < LEAST_SECONDS:
            row: dict[str, Any] = {"failed": "no time was left"}
        else:
            try:
                with time_limit(limit):
                    result = row = make()
            except Exception as error:  # noqa: BLE001  # the next measurement may still work
                traceback.print_exc()
                row = {"failed": f"{type(error).__name__}: {one_line(error)[:500]}"}
        row = {**row, "took_s": round(time.monotonic() - started, 2)}
        self._found[name] = row
        keep(self._file, self._found)
        print(f"{name}: {row.get('failed', 'done')}, {row['took_s']} s", flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return result


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Within this context, `TimeoutError` is raised after so many seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"stopped after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def command(*words: object) -> int:
    """Exit status of a Python command, as `-m dotmoe ...`; at an exception it ends, too."""
    line = [sys.executable, *map(str, words)]
    print("$", *line[1:], flush=True)
    with subprocess.Popen(line) as process:
        try:
            return process.wait()
        finally:
            process.kill()


def figures(run: Path) -> dict[str, Any]:
    """Perplexities of a finished run, the check of its export, and the seconds of its stages."""
    folder = RunFolder(run)
    results = read_json(folder.path_of("evaluate") / RESULTS)
    rows = {name: row for name, row in results.items() if isinstance(row, dict)}
    return {
        "perplexity": {n: row["perplexity"] for n, row in rows.items() if "perplexity" in row},
        "granularity": results["granularity"],
        "tokens": results.get("tokens"),
        "verification": results["verification"],
        "stages_s": {name: folder.seconds(name) for name in STAGES if folder.seconds(name)},
    }


def loss_curve(run: Path, stage: str = "finetune") -> dict[str, Any]:
    """Loss and seconds of each step of a training, finished or not; empty if there is none."""
    file = RunFolder(run).path_of(stage) / "metrics.jsonl"
    if not file.exists():
        return {}
    steps = [json.loads(line) for line in file.read_text().splitlines()]
    return {
        "steps": len(steps),
        "losses": [round(step["loss"], 4) for step in steps],
        "step_seconds": [round(step["seconds"], 4) for step in steps],
    }
