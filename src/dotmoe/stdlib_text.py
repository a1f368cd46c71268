"""The text every machine with Python has: the source files of its own standard library.

The embedded model is trained on it, and the quickstart converts and measures that model on it, so
neither needs a network. Files are held out by a hash of their path inside the library, so a file
that was held out when the model was trained stays held out on another machine or Python version.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

Split = Literal["train", "heldout"]

HELDOUT_SHARE = 16
"""One file in this many is held out."""

# Generated character tables and Unicode dumps: long, repetitive, nothing to learn from.
_TABLES = ("encodings/", "pydoc_data/", "lib2to3/pgen2/", "unicodedata", "html/entities.py")


def stdlib_files(split: Split, *, include_tests: bool = False) -> list[Path]:
    """Source files of this Python's standard library, in an order that mixes its parts.

    Args:
        split: `train`, or `heldout` (about one file in 16, chosen by a hash of its path).
        include_tests: Also the library's own test suite, which some distributions do not install.

    Returns:
        Absolute paths, ordered by a hash of the path inside the library: the same everywhere, and
        the first few are as good a sample as any.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(root).as_posix() for path in root.rglob("*.py")]
    chosen = [
        name
        for name in names
        if _is_library_source(name, include_tests) and _split_of(name) == split
    ]
    return [root / name for name in sorted(chosen, key=_digest)]


def stdlib_documents(split: Split, *, include_tests: bool = False) -> Iterator[str]:
    """Text of each file of `stdlib_files`; files that are not UTF-8 are passed over."""
    for path in stdlib_files(split, include_tests=include_tests):
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            yield text


def _is_library_source(name: str, include_tests: bool) -> bool:
    parts = name.split("/")
    if "site-packages" in parts or "dist-packages" in parts or name.startswith(_TABLES):
        return False
    is_test = any(part in ("test", "tests", "idle_test") for part in parts[:-1])
    return include_tests or not is_test


def _split_of(name: str) -> Split:
    return "heldout" if _digest(name)[0] % HELDOUT_SHARE == 0 else "train"


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()
