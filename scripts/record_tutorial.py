"""Type the tutorial in a fresh clone, and write its times and outputs to results/tutorial.json.

    python scripts/record_tutorial.py [FOLDER]

The commands are those that docs/tutorial.md prints, in its order. FOLDER is where the clone of this
commit goes (default: a temporary folder); a clone that is there goes on from the first step
that has not succeeded. A step's output is what it printed to stdout, from the first line that the
page shows. Takes half an hour, a network for the packages and the model, and 6 GB of disk.
"""

import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

from dotmoe.common.files import read_json, write_json
from dotmoe.run.provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = ROOT / "docs/tutorial.md", ROOT / "results/tutorial.json"
THREADS = "1"
WIDTH = "84"
"""Columns of the terminal, as many as a line of code on the site has."""


class Step(NamedTuple):
    """A part of the page whose command is recorded."""

    name: str
    title: str
    begins: str
    """How its command begins."""
    shown_from: str | None
    """What the first line of its output that the page shows has in it; None: it shows none."""
    shown_to: str | None = None
    """What the first line has in it that the page leaves out; None: it shows the rest."""


STEPS = (
    Step("install", "Install", "make setup", None),
    Step("model", "Get the model", "make smollm2/", None),
    Step("inspect", "Look before you pay", "dotmoe inspect", " model ", "dotmoe convert on"),
    Step("convert", "Convert", "dotmoe convert", "perplexity"),
    Step("ask", "Ask it", "dotmoe evaluate", "prompt:"),
    Step("report", "Read the report", "dotmoe report", "first-run"),
)


def commands(page: str) -> dict[str, str]:
    """The command of each step, as the page prints it."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    joined = [block.replace("\\\n", " ") for language, block in fences if not language]
    lines = [" ".join(line.split()) for block in joined for line in block.splitlines()]
    found = {}
    for step in STEPS:
        matching = [line for line in lines if line.startswith(step.begins)]
        if len(matching) != 1:
            raise SystemExit(f"{PAGE} has {len(matching)} commands that begin {step.begins!r}.")
        found[step.name] = matching[0]
    return found


def cloned(folder: Path) -> Path:
    """A clone of this commit in the folder, or the one that is there."""
    if not (folder / ".git").is_dir():
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    return folder


def typed(command: str, clone: Path) -> dict[str, Any]:
    """Run a command as a reader does whose environment is active; its times, status and output.

    As on a reader's machine, no answers of the model are in the cache.
    """
    path = f"{clone / '.venv/bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": WIDTH, "OMP_NUM_THREADS": THREADS}
    environment["XDG_CACHE_HOME"] = str(clone.with_name(f"{clone.name}.cache"))
    for name in ("PYTHONPATH", "VIRTUAL_ENV"):
        environment.pop(name, None)
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        ["bash", "-c", command], cwd=clone, env=environment, stdout=subprocess.PIPE, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return {
        "command": command,
        "cpu_s": round(cpu_s, 2),
        "wall_s": round(time.perf_counter() - started, 2),
        "status": done.returncode,
        "output": done.stdout,
    }


def shown(step: Step, output: str) -> str | None:
    """The part of a step's output that the page shows, without blanks at the ends of lines."""
    if step.shown_from is None:
        return None
    lines = [line.rstrip() for line in output.splitlines()]
    first = next(n for n, line in enumerate(lines) if step.shown_from in line)
    last = len(lines)
    if step.shown_to is not None:
        last = next(n for n, line in enumerate(lines) if n > first and step.shown_to in line)
    return "\n".join(lines[first:last]).rstrip()


def main() -> None:
    """Type all steps, and write the results."""
    clone = cloned(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(mkdtemp()) / "dotmoe")
    kept_file = clone.with_name(f"{clone.name}.steps.json")
    kept: dict[str, Any] = read_json(kept_file) if kept_file.is_file() else {}
    given = commands(PAGE.read_text(encoding="utf-8"))
    if any(done["command"] != given[name] for name, done in kept.items()):
        raise SystemExit(f"{clone} has steps of other commands. Name another folder.")
    for step in STEPS:
        if step.name in kept:
            continue
        print(f"{step.title}: {given[step.name]}", flush=True)
        done = typed(given[step.name], clone)
        if done["status"]:
            raise SystemExit(f"{given[step.name]} ended with status {done['status']}.")
        kept[step.name] = done
        write_json(kept_file, kept)
    steps = {}
    for step in STEPS:
        done = kept[step.name]
        output = shown(step, done.pop("output"))
        steps[step.name] = {"title": step.title, **done}
        if output is not None:
            steps[step.name]["output"] = output
    command = ["git", "-C", str(clone), "rev-parse", "--short=12", "HEAD"]
    origin = provenance(0)
    origin["commit"] = subprocess.check_output(command, text=True).strip()
    origin["threads"] = int(THREADS)
    model = "SmolLM2-135M-Instruct, Q4_1 GGUF, dequantised"
    record = {"origin": "measured", "model": model, "steps": steps, "provenance": origin}
    write_json(RESULTS, record)
    print(json.dumps({name: step["cpu_s"] for name, step in steps.items()}))


if __name__ == "__main__":
    main()
