"""Sources of text: the names that a user gives, their weights, and streams of their documents."""

import io
import json
import logging
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow
import pyarrow.parquet

from dotmoe.common.errors import UserError, nearest, one_line
from dotmoe.text.config import DataConfig

logger = logging.getLogger(__name__)

STDLIB, STDLIB_HELDOUT = "python-stdlib", "python-stdlib-heldout"
PIECE_CHARACTERS = 1 << 16
"""Maximum number of characters that are tokenised at once; longer documents are cut."""
FIELDS = ("text", "content", "page", "passage", "document", "messages")
"""Field names tried in a row, in this order, when no text field is given."""
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
FORMATS = f".txt, .md, .json, .jsonl (also with {', '.join(_COMPRESSIONS)}), .parquet"
"""Files that are read here, in words; `datasets` reads others."""
_SPLIT = "train"
"""Split of a source that names none."""
_SPLITS = {
    "train": "train|training",
    "validation": "validation|valid|val|dev",
    "test": "test|testing|eval|evaluation",
}
_CARRIAGE_RETURN = re.compile(r"\r\n?")
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


class Rendered(str):
    """A document in which names of control tokens stand for these tokens, such as a chat."""

    __slots__ = ()


def documents(config: DataConfig, tokenizer: Any = None) -> Iterator[str]:
    """Stream the documents of all sources, one source after the other.

    Carriage returns are line ends, as in Python's text mode. A chat is `Rendered` by the template
    of `tokenizer`, and refused without one. Raises `UserError` for a mix or a missing source, and,
    while reading, for one that is empty, damaged or not text.
    """
    if _is_mix(config):
        raise UserError(
            f"{', '.join(config.data)} is a mix, which is for training. Name files or a data set."
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
    for name, _ in sources:
        opened(name, config)
    return sources


def opened(source: str, config: DataConfig, tokenizer: Any = None) -> Iterator[str]:
    """Stream the documents of one source as `documents` does; `UserError` if it does not exist."""
    name, split, field = _split_name(source)
    path = Path(os.path.expanduser(name))
    if split and (name in (STDLIB, STDLIB_HELDOUT) or os.path.isfile(path)):
        raise UserError(f"{source} names the split {split}, but {name} has none. Name it alone.")
    rows, files = _RowText(field or None, tokenizer), local_files(source)
    if config.shuffle_buffer and (files or name in (STDLIB, STDLIB_HELDOUT)):
        raise UserError(
            f"{source} is read in its own order: a shuffle_buffer is for data sets of the datasets "
            "library. Leave it out, or shuffle the file."
        )
    if name in (STDLIB, STDLIB_HELDOUT):
        return stdlib_documents("train" if name == STDLIB else "heldout")
    if files:
        return _with_text(str(path), files, rows)
    if os.path.isdir(path):
        name = str(path)
    else:
        _require_hub_name(name, path)
    size = config.shuffle_buffer
    if size is None:  # the files of the mix are sorted by origin
        size = 10_000 if _has_dolmino(config) else 0
    seed = int.from_bytes(sha256(f"{config.data_seed}/0/{source}".encode()).digest()[:4], "little")
    read = enumerate(_dataset_rows(name, split or _SPLIT, size, seed), start=1)
    return (rows.text(row, f"row {number} of {name}") for number, row in read)


def local_files(source: str) -> list[Path]:
    """Files that a source consists of; none for one that is not local, or `datasets` reads.

    Raises `UserError` for a file of an unknown format, or a folder without text.
    """
    name, split, _ = _split_name(source)
    path = Path(os.path.expanduser(name))
    if os.path.isdir(path):
        return _files_in(path, split)
    if os.path.isfile(path) and _reader_of(path) is None:
        raise UserError(f"{path} is none of {FORMATS}. Convert it to one of them.")
    return [path] if os.path.isfile(path) else []


def _split_name(source: str) -> tuple[str, str, str]:
    """Name, split and field of a source; what exists under the whole name is that."""
    name, split, field = source, "", ""
    if not _is_there(name):
        name, _, field = name.partition("#")
    if not _is_there(name):
        name, _, split = name.partition("@")
    return name, split, field


def _require_hub_name(name: str, path: Path) -> None:
    if path.suffix in _COMPRESSIONS or _reader_of(path) or not _HUB_NAME.fullmatch(name):
        siblings = path.parent.iterdir() if os.path.isdir(path.parent) else ()
        near = nearest(str(path), map(str, siblings))
        raise UserError(f"{name} does not exist.{near} Name an existing file.")


def _is_there(name: str) -> bool:
    """Whether a path exists; methods of `Path` raise for an unknown ~user or a very long name."""
    return os.path.exists(os.path.expanduser(name))


def _dataset_rows(source: str, split: str, buffer: int, seed: int) -> Iterator[dict[str, Any]]:
    """Rows of a data set of the hub or a folder; `datasets` itself tries again where it breaks."""
    try:
        for row in _stream(source, split, buffer, seed):
            yield dict(row)
    except UserError:
        raise
    except Exception as error:  # of any type, those of the network and of parsers among them
        cause = one_line(error)[:200].rstrip(".") or type(error).__name__
        raise UserError(
            f"{source} ({split}) cannot be read by datasets: {cause}. Check its name, its "
            "configuration and split. The hub needs the network, and HF_HUB_OFFLINE unset."
        ) from error


def _stream(source: str, split: str, buffer: int, seed: int) -> Any:
    """The `datasets.IterableDataset` of a name or a folder, shuffled if there is a buffer."""
    # Importing datasets takes seconds, and local files do not need it.
    from datasets import load_dataset, load_from_disk

    name, _, part = (source, "", "") if _is_there(source) else source.partition(":")
    if _is_saved(Path(name)):
        saved = load_from_disk(name)
        if isinstance(saved, dict):
            if split not in saved:
                raise UserError(f"{name} has no split {split}. Name one of {', '.join(saved)}.")
            saved = saved[split]
        stream = saved.to_iterable_dataset()
    else:
        stream = load_dataset(name, part or None, split=split, streaming=True)
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


# --- files -------------------------------------------------------------------------------------


def _is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` of the `datasets` library wrote a folder."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _files_in(folder: Path, split: str) -> list[Path]:
    """Files of text in a folder and those below it, by name; none if `datasets` must read it.

    All have one format, that of most files, .md only where there is no other. `split`, or train if
    every file is named after a split, selects those whose names contain it; else all are read.
    Raises `UserError` if none has the split that is asked for.
    """
    readme = folder / "README.md"
    has_configs = readme.is_file() and "\nconfigs:" in readme.read_text(errors="replace")
    if has_configs or _is_saved(folder):
        return []
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    readers = {name: _reader_of(name) for name in names if "." not in [p[0] for p in name.parts]}
    if not readers:
        raise UserError(f"{folder} is an empty folder. Name one with files: {FORMATS}.")
    readers = {name: reader for name, reader in readers.items() if reader}
    readers = {name: reader for name, reader in readers.items() if name.suffix != ".md"} or readers
    if not readers:
        return []
    kind = Counter(readers.values()).most_common(1)[0][0]
    files = [name for name in readers if readers[name] is kind]

    def of(split: str) -> list[Path]:
        word = re.compile(f"(?<![a-z])({_SPLITS.get(split, re.escape(split))})(?![a-z])")
        return [name for name in files if word.search(name.as_posix().lower())]

    chosen = of(split or _SPLIT)
    if split and not chosen:
        raise UserError(
            f"{folder} has no file whose name says {split}, but {files[0]} and {len(files) - 1} "
            "more. Name it without a split, or a file."
        )
    if not split and len(set(chain.from_iterable(map(of, _SPLITS)))) < len(files):
        chosen = []
    chosen = chosen or files
    if others := [str(name) for name in readers if name not in files]:
        _warn_once(f"{folder}: files of another format are not read: {', '.join(others)}")
    return [folder / name for name in chosen]


@lru_cache
def _warn_once(text: str) -> None:
    logger.warning(text)


def _reader_of(path: Path) -> "_Reader | None":
    plain = path.with_suffix("") if path.suffix.lower() in _COMPRESSIONS else path
    return _READERS.get(plain.suffix.lower())


def _with_text(source: str, files: list[Path], rows: "_RowText") -> Iterator[str]:
    """Stream the documents of files; raises `UserError` if they hold no text at all."""
    is_empty = True
    for path in files:
        for document in file_documents(path, rows):
            is_empty = is_empty and not document.strip()
            yield document
    if is_empty:
        raise UserError(f"{source} is empty: it holds no text. Name a source with text in it.")


def file_documents(path: Path, rows: "_RowText") -> Iterator[str]:
    """Stream the documents of one file, whose suffix gives the format.

    Raises `UserError` if it is unreadable, damaged or not text.
    """
    read: Any = _reader_of(path)
    compression = _COMPRESSIONS.get(path.suffix.lower())
    try:
        with path.open("rb") as raw:
            if compression:
                raw = io.BufferedReader(pyarrow.input_stream(raw, compression=compression), 1 << 20)
            yield from read(path, raw, rows)
    except (OSError, UnicodeError, pyarrow.ArrowException) as error:
        cause = getattr(error, "strerror", None) or one_line(error)[:160].rstrip(".")
        raise UserError(
            f"{path} cannot be read ({cause}). Get it again, or correct its suffix."
        ) from error


def cut(text: str) -> Iterator[str]:
    """Cut text into pieces of at most `PIECE_CHARACTERS`, before lines that start with no blank.

    The pieces joined are `text`. Byte-level tokenizers split at such places too, so the tokens are
    those of the whole text; a SentencePiece tokenizer may see one more blank there.
    """
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        limit = start + PIECE_CHARACTERS
        line = end = text.rfind("\n", start, limit) + 1
        while end > start and text[end].isspace():
            end = text.rfind("\n", start, end - 1) + 1
        # Before a visible character, else at any line end, else at a blank, else anywhere.
        places = (end, line, text.rfind(" ", start, limit), limit)
        end = next(place for place in places if place > start)
        yield text[start:end]
        start = end
    yield text[start:]


class _RowText(NamedTuple):
    """How a row gives its text: `field`, else the first of `FIELDS` that it has."""

    field: str | None
    tokenizer: Any
    """Renders chats; None: they are refused."""

    def text(self, row: dict[str, Any], place: str) -> str:
        """Text of one row, empty for null; `UserError` if the field is missing or not text."""
        field = self.field or next((name for name in FIELDS if name in row), None)
        if field is None or field not in row:
            wanted = repr(self.field) if self.field else f"any of {', '.join(FIELDS)}"
            raise UserError(
                f"{place} has no field {wanted}; it has {', '.join(map(str, row)) or 'none'}. "
                "Name one: SOURCE#FIELD."
            )
        text, place = row[field], f"{field!r} in {place}"
        if text is None:
            return ""
        if isinstance(text, list) and all(isinstance(m, dict) and "role" in m for m in text):
            text = self._rendered(text, place)
        if not isinstance(text, str):
            raise UserError(
                f"{place} is {type(text).__name__}, not text. Name another field: SOURCE#FIELD."
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can write one half of a surrogate pair
            raise UserError(
                f"{place} is not Unicode text ({one_line(error)}). Repair or remove it."
            ) from error
        return type(text)(_CARRIAGE_RETURN.sub("\n", text)) if "\r" in text else text

    def _rendered(self, messages: list[Any], place: str) -> str:
        """A chat as the model reads it, without the BOS that packing adds."""
        if not getattr(self.tokenizer, "chat_template", None):
            why = "the model has no chat template" if self.tokenizer else "text is needed here"
            raise UserError(
                f"{place} is a chat, but {why}. Write it as text, or name a field: SOURCE#FIELD."
            )
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception as error:
            raise UserError(
                f"{place} does not suit the model's chat template ({one_line(error)[:160]}). "
                "Change or remove it."
            ) from error
        return Rendered(text.removeprefix(self.tokenizer.bos_token or ""))


def _text(_path: Path, file: io.BufferedReader, _rows: _RowText) -> Iterator[str]:
    """The one document of a file."""
    yield io.TextIOWrapper(file, encoding="utf-8-sig").read()  # its line ends become \n


def _json(path: Path, file: io.BufferedReader, rows: _RowText) -> Iterator[str]:
    """Documents of a JSON array, which is read whole, or of one object per line."""
    is_array = file.peek().removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    units = [file.read()] if is_array else file
    for number, unit in enumerate(units, start=1):
        if not unit.strip():
            continue
        place = str(path) if is_array else f"{path} line {number}"
        try:
            value = json.loads(unit.decode("utf-8-sig"))
        except ValueError as error:
            raise UserError(f"{place} is not JSON in UTF-8 ({error}). Fix it.") from error
        for row in value if is_array else [value]:
            if not isinstance(row, dict):
                raise UserError(f"{place} is not a JSON object. Write one object per line.")
            yield rows.text(row, place)


def _parquet(path: Path, file: io.BufferedReader, rows: _RowText) -> Iterator[str]:
    table = pyarrow.parquet.ParquetFile(file)
    wanted = [rows.field] if rows.field else FIELDS
    # Read only useful columns; without one, read all, so that the error can list their names.
    columns = [name for name in wanted if name in table.schema_arrow.names] or None
    batches = table.iter_batches(batch_size=256, columns=columns)
    read = chain.from_iterable(batch.to_pylist() for batch in batches)
    for number, row in enumerate(read, start=1):
        yield rows.text(row, f"{path} row {number}")


_Reader = Callable[[Path, io.BufferedReader, _RowText], Iterator[str]]
_READERS: dict[str, _Reader] = {
    ".txt": _text,
    ".md": _text,
    ".json": _json,
    ".jsonl": _json,
    ".parquet": _parquet,
}


# --- Python's own library ----------------------------------------------------------------------

Split = Literal["train", "heldout"]
HELDOUT_SHARE = 16
"""One file in this many is held out."""
# Generated character tables and Unicode dumps: long, repetitive, nothing to learn from.
_TABLES = ("encodings/", "pydoc_data/", "lib2to3/pgen2/", "unicodedata", "html/entities.py")
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def stdlib_documents(split: Split) -> Iterator[str]:
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
                yield text
