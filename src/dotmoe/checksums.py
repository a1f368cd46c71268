"""Size and SHA-256 of files: what a folder must hold, and what of it is damaged."""

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict


class FileSum(TypedDict):
    """What is remembered of one file."""

    bytes: int
    sha256: str


Manifest = Mapping[str, FileSum]
"""Size and digest of each file, by its path below the folder."""


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def manifest_of(folder: Path, names: Iterable[str]) -> dict[str, FileSum]:
    """Size and digest of files in a folder.

    Args:
        folder: Where they are.
        names: Their paths below it, with `/` between folders.
    """
    ordered = sorted(names)
    with ThreadPoolExecutor() as threads:
        digests = list(threads.map(lambda name: sha256_of(folder / name), ordered))
    return {
        name: {"bytes": (folder / name).stat().st_size, "sha256": digest}
        for name, digest in zip(ordered, digests, strict=True)
    }


def damage_in(folder: Path, manifest: Manifest) -> str | None:
    """What is wrong with a folder in one line; None where every file is as it was written.

    Sizes are looked at first, so that a truncated file is found without reading the others.
    """
    wrong_size = damage_in_sizes(folder, manifest)
    if wrong_size is not None:
        return wrong_size
    found = manifest_of(folder, manifest)
    for name, expected in manifest.items():
        if found[name]["sha256"] != expected["sha256"]:
            return f"{folder / name} has been altered: its SHA-256 is not that of what was written"
    return None


def damage_in_sizes(folder: Path, manifest: Manifest) -> str | None:
    """As `damage_in`, but no file is read: only what is missing or of another size is found."""
    for name, expected in manifest.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        size = path.stat().st_size
        if size < expected["bytes"]:
            return f"{path} is truncated: {size} of {expected['bytes']} bytes"
        if size > expected["bytes"]:
            return f"{path} has been altered: {size} bytes instead of {expected['bytes']}"
    return None
