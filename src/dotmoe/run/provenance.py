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
from dotmoe.common.device import resolved_device


def provenance(seed: int, device: str = "auto") -> dict[str, Any]:
    """Command, versions, commit, hardware, seed and time, to write beside a result.

    `device` is what computed, as it was given.
    """
    program = Path(sys.argv[0])
    name = "dotmoe" if program.stem == "__main__" else program.name
    versions = {"python": platform.python_version(), "dotmoe": __version__}
    for package in ("torch", "transformers", "safetensors", "datasets"):
        with suppress(PackageNotFoundError):  # local text needs no datasets
            versions[package] = version(package)
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join([name, *sys.argv[1:]]),
        "commit": commit(),
        "versions": versions,
        "hardware": _hardware(resolved_device(device)),
        "threads": torch.get_num_threads(),
        "seed": seed,
    }


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {os.cpu_count()} cores, {platform.machine()}"


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
