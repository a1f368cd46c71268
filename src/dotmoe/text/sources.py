"""Sources of text: the names that a user gives, their weights, and streams of their documents."""

import os
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dotmoe.common.errors import UserError, nearest_beside, one_line
from dotmoe.common.files import expanded, sha256_of
from dotmoe.text.config import DataConfig, asks
from dotmoe.text.files import COMPRESSIONS, FORMATS, documents_in, reader_of, suffix_of
from dotmoe.text.folders import TRAIN, FolderData, data_of_folder, files_below, is_saved
from dotmoe.text.rows import Document, RowReader

STDLIB, STDLIB_HELDOUT = "python-stdlib", "python-stdlib-heldout"
_LARGE_BYTES = 1 << 32
"""Size of a file that takes some seconds to read."""
_PIECES, _PIECE_BYTES = 256, 1 << 16
"""Of a larger file so many pieces are read, at equal distances."""
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")

DOLMINO, DOLMINO_DATASET = "dolmino", "allenai/dolmino-mix-1124"
# Quoted from the OLMo 2 report (2 OLMo 2 Furious), its 50B-token mix; not measured by us. The
# DOT-MoE paper samples "from the larger Dolmino-mix" and gives no proportions of its own.
DOLMINO_PERCENT = {
    "dclm": 47.2,
    "flan": 16.6,
    "pes2o": 5.85,
    "wiki": 7.11,
    "stackexchange": 2.45,
    "math": 20.8,
}
"""Percentage of the tokens that each configuration of the data set contributes."""


def text_of(config: DataConfig) -> DataConfig:
    """The config without the sources that only ask, such as `self`."""
    kept = [number for number, source in enumerate(config.data) if not asks(source)]
    weights = config.data_weights
    if weights:
        weights = tuple(weights[number] for number in kept)
    return replace(config, data=tuple(config.data[number] for number in kept), data_weights=weights)


def documents(config: DataConfig, tokenizer: Any = None) -> Iterator[Document]:
    """Stream the documents of all sources, one source after the other.

    Carriage returns are line ends, as in Python's text mode. A chat is rendered by the template
    of `tokenizer`, and refused without one. Raises `UserError` for a mix or a missing source, and,
    while reading, for one that is empty, damaged or not text.
    """
    if _is_mix(config):
        raise UserError(
            f"{', '.join(config.data)} is a mix, which is for training. Name files or a data set."
        )
    for source in config.data:
        if asks(source):
            raise UserError(
                f"{source} asks the model to write, which is text to fit to. Name files to measure "
                f"on; a file or folder of this name is ./{source}."
            )
    names = [name for name, _ in sources_of(config)]
    return chain.from_iterable([opened(name, config, tokenizer) for name in names])


def sources_of(config: DataConfig) -> list[tuple[str, float | None]]:
    """Every source with its share of the tokens (None: read in order), `dolmino` as its parts.

    Raises `UserError` if none is named, one is missing, or the number of weights is another.
    """
    names = config.data
    if not names:
        raise UserError(f"data names no source. Give {FORMATS} files, a datasets name or {STDLIB}.")
    sources: list[tuple[str, float | None]] = [(name, None) for name in names]
    if _is_mix(config):
        weights = config.data_weights or (1.0,)
        if len(weights) != len(names):
            raise UserError(
                f"data_weights has {len(config.data_weights)} numbers, but {', '.join(names)} are "
                f"a mix of {len(names)} sources. Give one for each."
            )
        sources = [
            (part, share * weight / sum(weights))
            for name, weight in zip(names, weights, strict=True)
            for part, share in _parts(name)
        ]
    # Opening a source reads nothing yet, but refuses one that does not exist.
    for name, _ in sources:
        opened(name, config)
    return sources


def opened(
    source: str, config: DataConfig, tokenizer: Any = None, *, answered: bool = False
) -> Iterator[Document]:
    """Stream the documents of one source as `documents` does; `UserError` if it does not exist.

    With `answered`, rows that ask give their messages, no text.
    """
    named = _named(source)
    _require_parts(named)
    if named.is_stdlib:
        _require_own_order(source, config)
        return stdlib_documents("train" if named.name == STDLIB else "heldout")
    rows = RowReader(source, named.field or None, tokenizer, answered)
    data = _local_data(named)
    if data and not data.by_datasets:
        _require_own_order(source, config)
        return documents_in(str(named.path), data.files, rows)
    return _dataset_documents(named, data, config, rows)


class _Named(NamedTuple):
    """A source as a user names it: NAME, NAME@SPLIT, NAME#FIELD or NAME@SPLIT#FIELD."""

    source: str
    """The whole."""
    name: str
    split: str
    """Empty: none is named."""
    field: str
    """Empty: none is named."""

    @property
    def path(self) -> Path:
        """Where the source is if it is local."""
        return expanded(self.name)

    @property
    def is_stdlib(self) -> bool:
        """Whether it is a part of Python's own library."""
        return self.name in (STDLIB, STDLIB_HELDOUT)


def _named(source: str) -> _Named:
    """The parts of a source's name; what exists under the whole name is that."""
    name, split, field = source, "", ""
    if not _is_there(name):
        name, _, field = name.partition("#")
    if not _is_there(name):
        name, _, split = name.partition("@")
    return _Named(source, name, split, field)


def _require_own_order(source: str, config: DataConfig) -> None:
    """Refuse a buffer to shuffle what is read here."""
    if config.shuffle_buffer:
        raise UserError(
            f"{source} is read in its own order: a shuffle_buffer is for data sets of the datasets "
            "library. Leave it out, or shuffle the file."
        )


def _dataset_documents(
    named: _Named, data: FolderData | None, config: DataConfig, rows: RowReader
) -> Iterator[Document]:
    """Documents of a folder that `datasets` reads; without `data`, of a data set of the hub."""
    if data:
        name, files = str(named.path), data.files
    else:
        _require_hub_name(named.name, named.path)
        name, files = named.name, []
    size = config.shuffle_buffer
    if size is None:  # the files of the mix are sorted by origin
        size = 10_000 if _has_dolmino(config) else 0
    drawn_by = f"{config.data_seed}/0/{named.source}"  # the 0 is kept so that draws stay
    seed = int.from_bytes(sha256(drawn_by.encode()).digest()[:4], "little")
    read = enumerate(_dataset_rows(name, files, named.split or TRAIN, size, seed), start=1)
    return (rows.document(row, f"row {number} of {name}") for number, row in read)


def _require_parts(named: _Named) -> None:
    """Refuse a source without a name, and a split or a field of what has none."""
    source, name, split, field = named
    is_file = os.path.isfile(named.path)
    if not name:
        raise UserError(f"{source!r} names no source. Name a file; this folder is `.`.")
    if split and (named.is_stdlib or is_file):
        raise UserError(f"{source} names the split {split}, but {name} has none. Name it alone.")
    if field and is_file and suffix_of(named.path) in (".txt", ".md"):
        raise UserError(f"{source} names the field {field}, but {name} has none. Name it alone.")


def local_files(source: str) -> list[Path]:
    """Files whose change changes the text of a source; none for one that is not local.

    Raises `UserError` for a file of an unknown format, or a folder without text.
    """
    named = _named(source)
    data = _local_data(named)
    if data is None:
        return []
    return data.files or files_below(named.path)


def fingerprints_of(sources: Iterable[str]) -> dict[str, str]:
    """SHA-256 of what each local source holds, by its number: `text 1`, `text 2`.

    Where a source lies does not matter. One that is not here, because it is of the hub or gone,
    and one that asks have none. A file of over `_LARGE_BYTES` counts by its size and time of
    change and pieces of it, `python-stdlib` by the version of Python.
    """
    found = {f"text {number}": _fingerprint_of(each) for number, each in enumerate(sources, 1)}
    return {name: sha for name, sha in found.items() if sha is not None}


def is_text(name: str) -> bool:
    """Whether an input of a run is one of its texts, by the name that `fingerprints_of` gives."""
    return name.startswith("text ")


def _fingerprint_of(source: str) -> str | None:
    if asks(source):
        return None
    named = _named(source)
    if named.is_stdlib:
        return sha256(platform.python_version().encode()).hexdigest()
    try:
        files = local_files(source)
    except UserError:  # such as a folder without its files
        return None
    if not files:
        return None
    root = named.path
    lines = [f"{file.relative_to(root).as_posix()} {_digest_of(file)}" for file in files]
    return sha256("\n".join(lines).encode()).hexdigest()


def _digest_of(file: Path) -> str:
    stat = file.stat()
    if stat.st_size <= _LARGE_BYTES:
        return sha256_of(file)
    digest = sha256(f"{stat.st_size} {stat.st_mtime_ns}".encode())
    with file.open("rb") as opened_file:
        for piece in range(_PIECES):
            opened_file.seek(piece * (stat.st_size - _PIECE_BYTES) // (_PIECES - 1))
            digest.update(opened_file.read(_PIECE_BYTES))
    return digest.hexdigest()


def _local_data(named: _Named) -> FolderData | None:
    """The files of a folder or file; None where there is neither."""
    path = named.path
    if os.path.isdir(path):
        return data_of_folder(path, named.split, named.field or None)
    if not os.path.isfile(path):
        return None
    if reader_of(path) is None:
        raise UserError(f"{path} is none of {FORMATS}. Convert it to one of them.")
    return FolderData([path], by_datasets=False)


def _require_hub_name(name: str, path: Path) -> None:
    if path.suffix in COMPRESSIONS or reader_of(path) or not _HUB_NAME.fullmatch(name):
        meant = nearest_beside(path)
        raise UserError(f"{name} does not exist.{meant} Name an existing file.")


def _is_there(name: str) -> bool:
    """Whether a path exists; not by `expanded`, as a `Path` forgets a slash at the end."""
    return os.path.exists(os.path.expanduser(name))


def _dataset_rows(
    source: str, files: list[Path], split: str, buffer: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Rows of a data set of the hub or a folder; `datasets` itself tries again where it breaks."""
    try:
        for row in _stream(source, files, split, buffer, seed):
            yield dict(row)
    except UserError:
        raise
    except Exception as error:  # of any type, those of the network and of parsers among them
        cause = one_line(error)[:200].rstrip(".") or type(error).__name__
        place = "" if _is_there(source) else " is no local file, and"
        raise UserError(
            f"{source} ({split}){place} cannot be read by datasets: {cause}. Check its name, its "
            "configuration and split. The hub needs the network, and HF_HUB_OFFLINE unset."
        ) from error


def _stream(source: str, files: list[Path], split: str, buffer: int, seed: int) -> Any:
    """The `datasets.IterableDataset` of a name or a folder, shuffled if there is a buffer.

    `files` are those of the folder to read; empty: `datasets` finds them.
    """
    # Importing datasets takes seconds, and local files do not need it.
    from datasets import load_dataset, load_from_disk

    name, part = source, ""
    if not _is_there(source):
        name, _, part = source.partition(":")
    # `datasets` takes relative names to be relative to the folder.
    named = {split: [str(path.resolve()) for path in files]} if files else None
    if is_saved(Path(name)):
        saved = load_from_disk(name)
        if isinstance(saved, dict):
            if split not in saved:
                raise UserError(f"{name} has no split {split}. Name one of {', '.join(saved)}.")
            saved = saved[split]
        stream = saved.to_iterable_dataset()
    else:
        stream = load_dataset(name, part or None, data_files=named, split=split, streaming=True)
    return stream.shuffle(seed=seed, buffer_size=buffer) if buffer else stream


def _is_mix(config: DataConfig) -> bool:
    """Whether sources are mixed by weight instead of read one after the other."""
    return bool(config.data_weights) or _has_dolmino(config)


def _has_dolmino(config: DataConfig) -> bool:
    """Whether a source is the paper's mix, which has weights of its own."""
    return any(map(_is_dolmino, config.data))


def _is_dolmino(name: str) -> bool:
    """Whether a name means the paper's mix; an existing file or folder of that name does not."""
    return name == DOLMINO and not _is_there(name)


def _parts(name: str) -> list[tuple[str, float]]:
    """Sources that a name stands for, with shares that sum to 1: several for the paper's mix."""
    if not _is_dolmino(name):
        return [(name, 1.0)]
    whole = sum(DOLMINO_PERCENT.values())
    return [(f"{DOLMINO_DATASET}:{part}", each / whole) for part, each in DOLMINO_PERCENT.items()]


# --- Python's own library ----------------------------------------------------------------------

Split = Literal["train", "heldout"]
HELDOUT_SHARE = 16
"""One file in this many is held out."""
# Generated character tables and Unicode dumps: long, repetitive, nothing to learn from.
_TABLES = ("encodings/", "pydoc_data/", "lib2to3/pgen2/", "unicodedata", "html/entities.py")
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def stdlib_documents(split: Split) -> Iterator[Document]:
    """Source files of this Python's standard library without its tests, by a hash of their path.

    The order is the same everywhere, and the first few files are as good a sample as any. The hash
    also selects the held-out files: the embedded model was trained on the others, and the
    quickstart measures it on these, on any machine and Python version.
    """
    root = Path(sysconfig.get_path("stdlib"))
    chosen = {}
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        digest = sha256(name.encode()).digest()
        own_split = "heldout" if digest[0] % HELDOUT_SHARE == 0 else "train"
        is_library = not name.startswith(_TABLES) and _LEFT_OUT.isdisjoint(name.split("/")[:-1])
        if own_split == split and is_library:
            chosen[digest] = path
    for _, path in sorted(chosen.items()):
        with suppress(UnicodeDecodeError, OSError):
            text = path.read_text(encoding="utf-8")
            if text.strip():
                yield Document(text)
