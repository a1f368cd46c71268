"""Small files that are there whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Write a whole file or nothing: temporary name, sync, rename, sync of the name."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read JSON written by `write_json`."""
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
