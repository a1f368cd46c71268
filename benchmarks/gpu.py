"""What a few minutes on one GPU tell: three parts of at most four minutes each.

    python benchmarks/gpu.py OUT --files FOLDER     # one GPU with 80 GB, no network
    python benchmarks/gpu.py OUT --parts shapes
    python benchmarks/gpu.py OUT --tiny             # a rehearsal of all parts on a CPU

`proof`: a GPU computes what the CPU computes. `shapes`: times and memory at the sizes of
Qwen2.5-7B, beside the estimates. `real`: a real model is converted, finetuned and asked questions.
docs/guides/gpu.md says what FOLDER holds, and every command.

Each part is a process of its own, killed at its limit. OUT/PART.json has each result as soon as it
is there, OUT/PART.log what the process printed. Runs and checkpoints are in the folder of
`--scratch`, by part; what it holds is removed first.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PARTS = ("proof", "shapes", "real")
GRACE = 10
"""Seconds that a part may take longer than it is told, to start and to end."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder for the results")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--files", type=Path, help="folder of model, texts and questions")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir(), "dotmoe-gpu"))
    parser.add_argument("--seconds", type=float, default=230, help="longest time of each part")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on a CPU")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    for part in asked.parts:
        started = time.monotonic()
        status = run_part(part, asked)
        print(f"{part}: {status}, {time.monotonic() - started:.0f} s", flush=True)


def run_part(part: str, asked: argparse.Namespace) -> str:
    """How the process of a part ended, in words."""
    shutil.rmtree(asked.scratch / part, ignore_errors=True)  # a finished run would not run again
    words = [sys.executable, "-u", str(Path(__file__).with_name(f"gpu_{part}.py")), str(asked.out)]
    words += ["--seconds", str(asked.seconds), "--scratch", str(asked.scratch / part)]
    if asked.files:
        words += ["--files", str(asked.files)]
    paths = [str(Path(__file__).resolve().parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    if asked.tiny:
        words += ["--tiny", "--device", "cpu"]
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with (asked.out / f"{part}.log").open("w") as log:
        # A session of its own, so that what it started ends with it.
        process = subprocess.Popen(
            words, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            status = process.wait(asked.seconds + GRACE)
        except subprocess.TimeoutExpired:
            return "killed at its limit"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return "done" if status == 0 else f"failed with status {status}"


if __name__ == "__main__":
    main()
