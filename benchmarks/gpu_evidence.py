"""What a GPU can show, part by part, in calls that may be stopped at any moment.

    make gpu-evidence                                          # all parts; results/gpu/*.json
    make gpu-evidence PARTS="tests assignment" SECONDS=570     # some of them, no longer than that
    python benchmarks/gpu_evidence.py --rehearse --out FOLDER  # all of it, tiny, on the CPU
    python benchmarks/gpu_evidence.py --table                  # only the table of goals

Each point is written, whole, as soon as it is measured; the next call goes on with what is missing.
A point that fails, or outlives its time, may leave a device in any state: the process starts itself
again, without that point. At the end stands the table of goals.
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

# Read when libraries are imported.
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
"""Seconds of each part over all calls, 25 minutes in all."""
GRACE_S = 20
"""For a training to save its checkpoint."""
STATE = "DOTMOE_GPU_EVIDENCE"
"""Environment variable that holds the state of a call over its starts."""
ASKED_OF_SMI = (
    *("name", "driver_version", "pstate", "clocks.sm", "clocks.mem", "clocks.max.sm"),
    *("power.draw", "power.limit", "temperature.gpu", "memory.total", "memory.used"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Which parts, for how long, and what the part with a real model takes."""

    parts: tuple[str, ...] = PARTS
    seconds: float = 1_500
    """Of this call."""
    out: Path = Path("results/gpu")
    """Folder of the results."""
    work: Path = Path("gpu-evidence")
    """Folder of the runs of the real model."""
    commit: str | None = None
    """Of this tree, where it is a copy without its history."""
    rehearse: bool = False
    """All parts at tiny size on the CPU."""
    table: bool = False
    """Only print the table."""
    real: real_model.RealModel = field(default_factory=real_model.RealModel)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """What a call knows over its starts."""

    deadline: float
    """Of the system's monotonic clock."""
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
    """Make the folders; end with a message without a GPU, or a clean commit to be named."""
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
    """Measure what is missing of a part, until its time is over."""
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
            error = "its time was over; the next call goes on, or begins again"
        except Exception as raised:  # noqa: BLE001  (told, kept, and the process starts again)
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
    """Inside, SIGTERM interrupts, and comes by itself after so many seconds.

    Training saves a checkpoint then. What does not end is cut off: the process goes on as `call`.
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
    """Go on in a fresh interpreter."""
    os.environ[STATE] = json.dumps(asdict(call))
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.argv])


def points_of(part: str, settings: Settings) -> gpu_parts.Points:
    """What a part measures, by name."""
    at = gpu_parts.REHEARSAL if settings.rehearse else gpu_parts.Scale()
    if part != "real":
        return POINTS[part](at)
    real = real_model.rehearsed(settings.work) if settings.rehearse else settings.real
    if not (real.gguf and real.text and real.wikitext):
        print("real: not measured without --gguf, --text and --wikitext")
        return {}
    # Reports without plots, which cost seconds.
    sys.modules["matplotlib"] = None  # type: ignore[assignment]
    runs = real_model.Runs(real, at.device, settings.work, settings.out / "real.json")
    return runs.points()


def read(file: Path) -> dict[str, Any]:
    """What is kept of a part."""
    empty = {"part": file.stem, "seconds": 0.0, "points": {}, "failed": {}}
    return read_json(file) if file.exists() else empty


def state_of_gpu() -> dict[str, str] | None:
    """Clocks, power and driver, where nvidia-smi is there to say."""
    asked = ["nvidia-smi", f"--query-gpu={','.join(ASKED_OF_SMI)}", "--format=csv,noheader"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(ASKED_OF_SMI, said.splitlines()[0].split(", "), strict=False))


if __name__ == "__main__":
    sys.exit(main())
