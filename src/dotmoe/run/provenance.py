"""Where a result comes from: command, versions, commit and hardware."""

import os
import platform
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from dotmoe import __version__


def provenance(seed: int) -> dict[str, Any]:
    """Command, versions, commit, hardware, seed and time, to write beside a result."""
    program = Path(sys.argv[0])
    name = "dotmoe" if program.stem == "__main__" else program.name
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    versions = {"python": platform.python_version(), "dotmoe": __version__}
    for package in ("torch", "transformers", "safetensors", "datasets"):
        with suppress(PackageNotFoundError):  # local text needs no datasets
            versions[package] = version(package)
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join([name, *sys.argv[1:]]),
        "commit": commit(),
        "versions": versions,
        "hardware": gpu or f"CPU, {os.cpu_count()} cores, {platform.machine()}",
        "threads": torch.get_num_threads(),
        "seed": seed,
    }


@lru_cache
def commit() -> str | None:
    """Commit of dotmoe's source tree, with `+changes` if it is not clean; None outside git."""
    root = Path(__file__).parents[3]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+changes", "--abbrev=12"]
    try:
        name = subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return name.strip() if (root / ".git").exists() else None
