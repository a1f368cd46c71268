"""Where a result comes from."""

import os
import platform
import shlex
import subprocess
import sys
import time
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from dotmoe import __version__


def provenance(seed: int) -> dict[str, Any]:
    """Command, versions, commit, machine, seed and time, to be written beside a result."""
    program = Path(sys.argv[0])
    name = "dotmoe" if program.stem == "__main__" else program.name
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    packages = ("torch", "transformers", "safetensors", "datasets")
    versions = {"python": platform.python_version(), "dotmoe": __version__}
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join([name, *sys.argv[1:]]),
        "commit": commit(),
        "versions": versions | {name: version(name) for name in packages},
        "hardware": gpu or f"CPU, {os.cpu_count()} cores, {platform.machine()}",
        "threads": torch.get_num_threads(),
        "seed": seed,
    }


@lru_cache
def commit() -> str | None:
    """Commit of our source tree, with `+changes` where it is not clean; None outside git."""
    root = Path(__file__).parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+changes", "--abbrev=12"]
    try:
        said = subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return said.strip() if (root / ".git").exists() else None
