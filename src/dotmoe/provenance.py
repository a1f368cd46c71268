"""Where a result comes from."""

import os
import platform
import subprocess
import time
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("dotmoe", "torch", "transformers", "safetensors", "datasets")


def provenance(seed: int) -> dict[str, Any]:
    """Versions, commit, machine, seed and time, to be written beside a result."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
        "versions": {"python": platform.python_version()} | {n: _version(n) for n in _PACKAGES},
        "hardware": gpu or f"CPU, {os.cpu_count()} cores, {platform.machine()}",
        "threads": torch.get_num_threads(),
        "seed": seed,
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


@lru_cache
def _commit() -> str | None:
    """Commit of our source tree, with `+changes` where it is not clean; None outside git."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+changes", "--abbrev=12"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
