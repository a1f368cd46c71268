"""The text every machine with Python has: the source files of its own standard library.

The embedded model is trained on it, and the quickstart converts and measures that model on it, so
neither needs a network. Files are held out by a hash of their path inside the library, so a file
that was held out when the model was trained stays held out on another machine or Python version.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

Split = Literal["train", "heldout"]

HELDOUT_SHARE = 16
"""One file in this many is held out."""

# Generated character tables and Unicode dumps: long, repetitive, nothing to learn from.
_TABLES = ("encodings/", "pydoc_data/", "lib2to3/pgen2/", "unicodedata", "html/entities.py")
_PACKAGES, _TESTS = {"site-packages", "dist-packages"}, {"test", "tests", "idle_test"}


def stdlib_files(split: Split, *, include_tests: bool = False) -> list[Path]:
    """Source files of this Python's standard library, ordered by a hash of the path inside it.

    So the order is the same everywhere, and the first few are as good a sample as any. With tests,
    the library's own test suite is among them, which some distributions do not install.
    """
    root = Path(sysconfig.get_path("stdlib"))
    excluded = _PACKAGES if include_tests else _PACKAGES | _TESTS
    chosen = {}
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        digest = hashlib.sha256(name.encode()).digest()
        own_split = "heldout" if digest[0] % HELDOUT_SHARE == 0 else "train"
        is_library = not name.startswith(_TABLES) and excluded.isdisjoint(name.split("/")[:-1])
        if own_split == split and is_library:
            chosen[digest] = path
    return [chosen[digest] for digest in sorted(chosen)]


def stdlib_documents(split: Split, *, include_tests: bool = False) -> Iterator[str]:
    """Text of each file of `stdlib_files`; files that are not UTF-8 are passed over."""
    for path in stdlib_files(split, include_tests=include_tests):
        with suppress(UnicodeDecodeError, OSError):
            text = path.read_text(encoding="utf-8")
            if text.strip():
                yield text
