"""Run the GPU measurements part by part, in calls that may be stopped at any moment.

    make gpu-evidence                                          # all parts; results/gpu/*.json
    make gpu-evidence PARTS="tests assignment" SECONDS=570     # some parts, no longer than that
    python benchmarks/gpu_evidence.py --rehearse --out FOLDER  # all of it, tiny, on the CPU
    python benchmarks/gpu_evidence.py --table                  # only the table of goals

Each point is written as a whole as soon as it is measured; the next call measures what is missing.
A point that fails or runs out of time may leave the device in any state, so the process restarts
itself without that point. At the end, the table of goals is printed.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

# The libraries read these when they are imported.
os.environ |= {"TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import tyro
from rich.console import Console

import gpu_goals
import gpu_parts
import real_model
from dotmoe.errors import one_line
from dotmoe.files import read_json, write_json
from dotmoe.run_folder import commit, provenance
from dotmoe.tables import to_rich
from gpu_goals import PARTS
from rounds import require_device

POINTS = {
    "tests": gpu_parts.tests,
    "assignment": gpu_parts.assigning,
    "alignment": gpu_parts.aligning,
    "finetune": gpu_parts.finetuning,
    "serving": gpu_parts.serving,
}
BUDGETS = dict(zip(PARTS, (90, 150, 200, 90, 150, 820), strict=True))
"""Time limit of each part in seconds, over all calls; 25 minutes in total."""
GRACE_S = 20
"""Seconds that a training has to save its checkpoint."""
STATE = "DOTMOE_GPU_EVIDENCE"
"""Environment variable that holds the state of a call across restarts of the process."""
ASKED_OF_SMI = (
    *("name", "driver_version", "pstate", "clocks.sm", "clocks.mem", "clocks.max.sm"),
    *("power.draw", "power.limit", "temperature.gpu", "memory.total", "memory.used"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Which parts to run, for how long, and the inputs of the part with a real model."""

    parts: tuple[str, ...] = PARTS
    seconds: float = 1_500
    """Time limit of this call."""
    out: Path = Path("results/gpu")
    """Folder for the results."""
    work: Path = Path("gpu-evidence")
    """Folder for the runs of the real model."""
    commit: str | None = None
    """Commit of this tree, if it is a copy without history."""
    rehearse: bool = False
    """Run all parts at tiny size on the CPU."""
    table: bool = False
    """Only print the table."""
    real: real_model.RealModel = field(default_factory=real_model.RealModel)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """State of a call, kept across restarts of the process."""

    deadline: float
    """When the call ends, by the system's monotonic clock."""
    skipped: tuple[str, ...] = ()
    """Points that failed, as `part, point`."""


def main() -> int:
    settings = tyro.cli(Settings, config=(tyro.conf.OmitArgPrefixes,), description=__doc__)
    if not settings.table:
        prepare(settings)
        before = json.loads(os.environ.get(STATE, "{}"))
        call = Call(**{"deadline": time.monotonic() + settings.seconds} | before)
        for part in settings.parts:
            run(part, settings, call)
    Console().print(to_rich(gpu_goals.table(settings.out)))
    failed = {part: read(settings.out / f"{part}.json")["failed"] for part in settings.parts}
    for part, names in failed.items():
        for name, error in names.items():
            print(f"{part}, {name} failed: {error}")
    return int(any(failed.values()))


def prepare(settings: Settings) -> None:
    """Make the folders; exit with a message if there is no GPU or no clean commit to name."""
    if settings.rehearse:
        torch.set_num_threads(1)
        os.environ["XDG_CACHE_HOME"] = str(settings.work / "cache")
    else:
        require_device("cuda")
        named = settings.commit or str(commit())
        if named == "None" or "+" in named:
            raise SystemExit(
                f"The commit is {named}. Commit all changes, or name the commit that this is a "
                "copy of with --commit."
            )
    for folder in (settings.out, settings.work):
        folder.mkdir(parents=True, exist_ok=True)


def run(part: str, settings: Settings, call: Call) -> None:
    """Measure the missing points of a part, until its time is over."""
    file = settings.out / f"{part}.json"
    made = provenance(0) | ({"commit": settings.commit} if settings.commit else {})
    about = {"origin": "rehearsed" if settings.rehearse else "measured", "provenance": made}
    for name, measure in points_of(part, settings).items():
        record, key = read(file), f"{part}, {name}"
        if name in record["points"] or key in call.skipped:
            continue
        started, before, error = time.monotonic(), state_of_gpu(), None
        left = min(call.deadline - started, BUDGETS[part] - record["seconds"])
        if left <= 0:
            print(f"{key}: no time is left", flush=True)
            return
        print(key, flush=True)
        try:
            with limited(left, replace(call, skipped=(*call.skipped, key))):
                found = measure()
        except KeyboardInterrupt:
            if time.monotonic() < started + left:
                raise
            error = "its time was over; the next call resumes or restarts it"
        except Exception as raised:  # noqa: BLE001  (printed, recorded, and the process restarts)
            traceback.print_exc()
            error = f"{type(raised).__name__}: {one_line(raised)}"[:500]
        seconds = time.monotonic() - started
        record |= about | {"seconds": record["seconds"] + seconds}
        record["failed"].pop(name, None)
        if error is None:
            states = {"before": before, "after": state_of_gpu()}
            point = {"found": found, "seconds": seconds, "gpu": states, "provenance": made}
            record["points"][name] = point
        else:
            record["failed"][name] = error
        write_json(file, record)
        if error is not None and time.monotonic() < call.deadline:
            start_again(replace(call, skipped=(*call.skipped, key)))
        if not settings.rehearse:
            gc.collect()
            torch.cuda.empty_cache()


@contextmanager
def limited(seconds: float, call: Call) -> Iterator[None]:
    """Within this context, SIGTERM interrupts, and is sent automatically after `seconds`.

    Training then saves a checkpoint. If it does not end, the process is restarted as `call`.
    """

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    timers = (
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM)),
        threading.Timer(seconds + GRACE_S, start_again, (call,)),
    )
    for timer in timers:
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        signal.signal(signal.SIGTERM, before)


def start_again(call: Call) -> None:
    """Restart the process in a fresh interpreter, with the state of `call`."""
    os.environ[STATE] = json.dumps(asdict(call))
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.argv])


def points_of(part: str, settings: Settings) -> gpu_parts.Points:
    """The points of a part by name, each with the function that measures it."""
    at = gpu_parts.REHEARSAL if settings.rehearse else gpu_parts.Scale()
    if part != "real":
        return POINTS[part](at)
    real = real_model.rehearsed(settings.work) if settings.rehearse else settings.real
    if not (real.gguf and real.text and real.wikitext):
        print("real: not measured without --gguf, --text and --wikitext")
        return {}
    # Make reports without plots, which cost seconds.
    sys.modules["matplotlib"] = None  # type: ignore[assignment]
    runs = real_model.Runs(real, at.device, settings.work, settings.out / "real.json")
    return runs.points()


def read(file: Path) -> dict[str, Any]:
    """The stored results of a part."""
    empty = {"part": file.stem, "seconds": 0.0, "points": {}, "failed": {}}
    return read_json(file) if file.exists() else empty


def state_of_gpu() -> dict[str, str] | None:
    """Clocks, power and driver, if nvidia-smi is installed."""
    asked = ["nvidia-smi", f"--query-gpu={','.join(ASKED_OF_SMI)}", "--format=csv,noheader"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(ASKED_OF_SMI, said.splitlines()[0].split(", "), strict=False))


if __name__ == "__main__":
    sys.exit(main())
