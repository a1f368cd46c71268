"""Which files of a folder are the data."""

import json
import logging
import os
import re
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from dotmoe.common.errors import UserError
from dotmoe.common.progress import warn_once
from dotmoe.text.files import FORMATS, reader_of, suffix_of
from dotmoe.text.rows import full_fields

logger = logging.getLogger(__name__)

TRAIN = "train"
"""Split that is read of data that names none."""
_SPLITS = {
    "train": "train|training",
    "validation": "validation|valid|val|dev",
    "test": "test|testing|eval|evaluation",
}
_KINDS = {
    ".txt": "text",
    ".md": "Markdown",
    ".json": "JSON",
    ".jsonl": "JSON",
    ".parquet": "parquet",
    ".csv": "CSV",
    ".tsv": "CSV",
    ".arrow": "arrow",
}
"""Kinds of files that may be the data of a folder; `datasets` reads those that have no reader."""
_ABOUT = re.compile(
    r"(readme|licen[sc]e|copying)([._-].*)?"
    r"|(notice|authors|contributors|citation|changelog|contributing|code_of_conduct|requirements)"
    r"(\.(txt|md))?"
    r"|(.*_)?(dataset_)?infos?\.json"
)
"""Names, in small letters, of files that say something about data."""
_SMALL_BYTES = 1 << 20
_NAMED = 6
"""Number of files that a line names; more are counted."""


@dataclass(frozen=True, slots=True)
class FolderData:
    """The files of a folder that are its data; none: the `datasets` library finds them."""

    files: list[Path]
    by_datasets: bool
    """Whether the `datasets` library reads them."""


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` of the `datasets` library wrote a folder."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def files_below(folder: Path) -> list[Path]:
    """Files in a folder and those below it, by name, without hidden ones; links are followed."""
    found = list[Path]()
    seen = set[str]()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:  # a link that leads back
            folders.clear()
            continue
        seen.add(real)
        found += [Path(place, name).relative_to(folder) for name in names]
    shown = (name for name in found if not any(part[0] == "." for part in name.parts))
    return [folder / name for name in sorted(shown) if (folder / name).is_file()]


def data_of_folder(folder: Path, split: str, field: str | None) -> FolderData:
    """The data of a folder: its files of the kind with the most bytes, at any depth, by name.

    Files about the data, such as a licence, are left out, and Markdown where there is another
    kind; what is left out is printed. `split`, or train if every file is named after a split,
    selects the files whose names contain it; else all are read. Raises `UserError` if the folder
    has no file, or none of the split that is asked for.
    """
    readme = folder / "README.md"
    has_configs = readme.is_file() and "\nconfigs:" in readme.read_text(errors="replace")
    if has_configs or is_saved(folder):
        return FolderData([], by_datasets=True)
    present = files_below(folder)
    if not present:
        raise UserError(f"{folder} is an empty folder. Name one with files: {FORMATS}.")
    files = _of_largest_kind(present, field)
    if not files:
        return FolderData([], by_datasets=True)
    if left_out := [str(path.relative_to(folder)) for path in present if path not in set(files)]:
        more = f" and {len(left_out) - _NAMED} more" if len(left_out) > _NAMED else ""
        warn_once(
            logger,
            f"{folder}: its {_KINDS[suffix_of(files[0])]} files are read, the kind with the most "
            f"bytes; left out: {', '.join(left_out[:_NAMED])}{more}",
        )
    chosen = _of_split(folder, files, split)
    return FolderData(chosen, by_datasets=reader_of(files[0]) is None)


def _of_largest_kind(present: list[Path], field: str | None) -> list[Path]:
    """The files of the kind with the most bytes; empty if no kind is known."""
    known = [path for path in present if suffix_of(path) in _KINDS]
    data = [path for path in known if not _ABOUT.fullmatch(path.name.lower())]
    data = [path for path in data if not _describes(path, field)] or data or known
    data = [path for path in data if suffix_of(path) != ".md"] or data
    num_bytes = Counter[str]()
    for path in data:
        num_bytes[_KINDS[suffix_of(path)]] += path.stat().st_size
    if not num_bytes:
        return []
    kind, _ = num_bytes.most_common(1)[0]
    return [path for path in data if _KINDS[suffix_of(path)] == kind]


def _describes(path: Path, field: str | None) -> bool:
    """Whether a small `.json` file is one object without text, such as a description of data."""
    if path.suffix.lower() != ".json" or path.stat().st_size > _SMALL_BYTES:
        return False
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):  # rows, one a line, or damaged
        return False
    if not isinstance(value, dict):
        return False
    return field not in value if field else not full_fields(value)


def _of_split(folder: Path, files: list[Path], split: str) -> list[Path]:
    def named(split: str) -> list[Path]:
        word = re.compile(f"(?<![a-z])({_SPLITS.get(split, re.escape(split))})(?![a-z])")
        names = {path: path.relative_to(folder).as_posix().lower() for path in files}
        return [path for path, name in names.items() if word.search(name)]

    if split:
        if chosen := named(split):
            return chosen
        raise UserError(
            f"{folder} has no file whose name says {split}, but {files[0].relative_to(folder)} and "
            f"{len(files) - 1} more. Name it without a split, or a file."
        )
    of_any_split = set(chain.from_iterable(map(named, _SPLITS)))
    if len(of_any_split) < len(files):
        return files
    return named(TRAIN) or files
