"""Sources of text: the names that a user gives, their weights, and streams of their documents."""

import gzip
import io
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from pathlib import Path
from random import Random
from typing import IO, Annotated, Any, Literal, cast

import pyarrow
import pyarrow.parquet

from dotmoe.errors import UserError, nearest, one_line
from dotmoe.options import above, at_least

SELF = "self"
"""Name of the source that is sampled from the dense model; it can only be trained on."""
STDLIB, STDLIB_HELDOUT = "python-stdlib", "python-stdlib-heldout"
PIECE_CHARACTERS = 1 << 16
"""Maximum number of characters that are tokenised at once; longer documents are cut."""
FIELDS = ("text", "content", "page", "passage", "document")
"""Field names tried in a row, in this order, when no text field is given."""
FORMATS = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet")
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


class Continuation(str):
    """A piece that continues the document of the piece before it."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Text to train or calibrate on."""

    data: tuple[str, ...] = ()
    """Sources of text, read in this order: .txt files (one document per file), .jsonl or .parquet
    files (one document per row), the first two also as .gz; `python-stdlib` (the source files of
    this Python's standard library) or `python-stdlib-heldout` (the sixteenth of them that is held
    out); data sets of the `datasets` library, streamed (`allenai/c4:en`: the configuration follows
    the colon); `dolmino` (the paper's mix, from the hub; `dolmino:FOLDER`: a local copy); `self`:
    text sampled from the dense model itself. `SOURCE@SPLIT#FIELD` sets the split and the text field
    of one source."""
    data_weights: tuple[Annotated[float, above(0)], ...] = ()
    """Mix the sources in these proportions of the tokens: one weight per source, with any sum. A
    source that runs out is not repeated; the others continue in their proportions. Default: read
    one source after the other."""
    shuffle_buffer: Annotated[int | None, at_least(0)] = None
    """Size of each source's shuffle buffer in documents; 0 keeps the source's own order. For
    `datasets` sources, a buffer also shuffles the order of their files. Default: 10000 for
    `dolmino`, else 0."""
    data_seed: Annotated[int, at_least(0)] = 0
    """Seed of the shuffle buffer, and of text sampled from the dense model."""
    text_field: str | None = None
    """Field of a row that holds the text. Default: the first of text, content, page, passage,
    document that the rows have."""
    split: str = "train"
    """Split of a `datasets` source; files have none."""
    seq_len: Annotated[int, at_least(2)] = 2048
    """Tokens per block, 2 or more. Paper: 2048. Lowered to the model's context if that is less."""

    @property
    def has_dolmino(self) -> bool:
        """Whether a source is the paper's mix, which has weights of its own."""
        return any(map(_is_dolmino, self.data))

    @property
    def is_mix(self) -> bool:
        """Whether sources are mixed by weight instead of read one after the other."""
        return bool(self.data_weights) or self.has_dolmino


def documents(config: DataConfig) -> Iterator[str]:
    """Stream the documents of all sources, one source after the other.

    A long .txt file comes in pieces; the later ones are `Continuation`. Raises `UserError` for a
    mix or a missing source, and, while reading, for one that is empty, damaged or not text.
    """
    if config.is_mix:
        raise UserError(
            f"{', '.join(config.data)} is a mix, which is for training. Name files or a data set."
        )
    return chain.from_iterable([opened(name, config) for name, _ in sources_of(config)])


def sources_of(config: DataConfig) -> list[tuple[str, float | None]]:
    """Every source with its share of the tokens (None: read in order), `dolmino` as its parts.

    Raises `UserError` if none is named, one is missing, or the number of weights is another.
    """
    names = config.data
    if not names:
        raise UserError(
            f"data names no source. Give {', '.join(FORMATS)} files, a datasets name or {STDLIB}."
        )
    if SELF in names:
        raise UserError(
            f"{SELF} is text to train on, sampled from the dense model, and cannot be mixed or "
            f"measured on. Give it alone, or name a text. (For a folder: ./{SELF})"
        )
    sources: list[tuple[str, float | None]] = [(name, None) for name in names]
    if config.is_mix:
        weights = config.data_weights or (1.0,)
        if len(weights) != len(names):
            raise UserError(
                f"data_weights has {len(config.data_weights)} numbers, but {', '.join(names)} are "
                f"a mix of {len(names)} sources. Give one for each."
            )
        sources = [
            (part, share * weight / sum(weights))
            for name, weight in zip(names, weights, strict=True)
            for part, share in (_dolmino(name) if _is_dolmino(name) else [(name, 1.0)])
        ]
    for name, _ in sources:
        opened(name, config)
    return sources


def opened(source: str, config: DataConfig) -> Iterator[str]:
    """Stream the documents of one source; raises `UserError` if it does not exist."""
    name, split, field = source, "", ""
    if not _is_there(name):
        name, _, field = name.partition("#")
    if not _is_there(name):
        name, _, split = name.partition("@")
    text_field = field or config.text_field
    size = config.shuffle_buffer
    if size is None:  # the files of the mix are sorted by origin
        size = 10_000 if config.has_dolmino else 0
    seed = int.from_bytes(sha256(f"{config.data_seed}/0/{source}".encode()).digest()[:4], "little")
    path = Path(os.path.expanduser(name))
    if split and (name in (STDLIB, STDLIB_HELDOUT) or os.path.isfile(path)):
        raise UserError(f"{source} names the split {split}, but {name} has none. Name it alone.")
    if name in (STDLIB, STDLIB_HELDOUT):
        return shuffled(stdlib_documents("train" if name == STDLIB else "heldout"), size, seed)
    if os.path.isfile(path):
        return shuffled(file_documents(path, text_field), size, seed)
    if os.path.isdir(path):
        name = str(path)
    elif name.endswith((*FORMATS, ".gz")) or not _HUB_NAME.fullmatch(name):
        siblings = path.parent.iterdir() if os.path.isdir(path.parent) else ()
        near = nearest(str(path), map(str, siblings))
        raise UserError(f"{name} does not exist.{near} Name an existing file.")
    return _dataset_documents(name, split or config.split, text_field, size, seed)


def shuffled(stream: Iterable[str], size: int, seed: int) -> Iterator[str]:
    """Shuffle documents, or pieces of long ones, in a seeded buffer of `size`; 0: no shuffling."""
    if size == 0:
        yield from stream
        return
    generator = Random(seed)
    held: list[str] = []
    for document in stream:
        if len(held) < size:
            held.append(str(document))
        elif document:
            place = generator.randrange(size)
            yield held[place]
            held[place] = str(document)
    generator.shuffle(held)
    yield from held


def _is_there(name: str) -> bool:
    """Whether a path exists; methods of `Path` raise for an unknown ~user or a very long name."""
    return os.path.exists(os.path.expanduser(name))


def _dataset_documents(
    source: str, split: str, text_field: str | None, buffer: int, seed: int
) -> Iterator[str]:
    # Importing datasets takes seconds, and local files do not need it.
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    name, _, part = (source, "", "") if _is_there(source) else source.partition(":")
    try:
        rows = load_dataset(name, part or None, split=split, streaming=True)
        if buffer:
            rows = rows.shuffle(seed=seed, buffer_size=buffer)
        for number, row in enumerate(rows, start=1):
            yield text_of_row(dict(row), text_field, f"row {number} of {source}")
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError, DatasetGenerationError) as error:
        cause = one_line(error)[:200].rstrip(".") or type(error).__name__
        package = " Files in .zst need: pip install zstandard." if "zstd" in cause.lower() else ""
        raise UserError(
            f"{source} ({split}) cannot be read by datasets: {cause}. "
            f"Check the name, the split and the network.{package}"
        ) from error


def _is_dolmino(name: str) -> bool:
    """Whether a name means the paper's mix; an existing file or folder of that name does not."""
    return name.partition(":")[0] == DOLMINO and not _is_there(name)


def _dolmino(name: str) -> list[tuple[str, float]]:
    """Sources that make up the mix, on the hub or in a local copy, with shares that sum to 1."""
    root = Path(os.path.expanduser(name.partition(":")[2]))
    whole, sources = sum(DOLMINO_PERCENT.values()), []
    for part, percent in DOLMINO_PERCENT.items():
        source = f"{DOLMINO_DATASET}:{part}"
        if ":" in name:
            folders = [f for f in (root / part, root / "data" / part) if os.path.isdir(f)]
            if not folders:
                raise UserError(
                    f"{root} has no folder {part} (nor data/{part}). Name a copy of the whole mix."
                )
            source = str(folders[0])
        sources.append((source, percent / whole))
    return sources


# --- files -------------------------------------------------------------------------------------


def file_documents(path: Path, text_field: str | None) -> Iterator[str]:
    """Stream the documents of one file; its suffix gives the format.

    Raises `UserError` if the format is unknown, or the file unreadable, damaged, empty or not text.
    """
    name = path.name.lower()
    if not name.endswith(FORMATS):
        raise UserError(f"{path} is none of {', '.join(FORMATS)}. Convert it to one of them.")
    readers = {".txt": _text, ".jsonl": _jsonl, ".parquet": _parquet}
    read = readers[Path(name.removesuffix(".gz")).suffix]
    is_empty = True
    try:
        with cast(IO[bytes], gzip.open(path) if name.endswith(".gz") else path.open("rb")) as file:
            for document in read(path, file, text_field):
                is_empty = is_empty and not document.strip()
                yield document
    except (OSError, EOFError, zlib.error, UnicodeError, pyarrow.ArrowException) as error:
        cause = getattr(error, "strerror", None) or one_line(error)[:160].rstrip(".")
        raise UserError(
            f"{path} cannot be read ({cause}). Get it again, or correct its suffix."
        ) from error
    if is_empty:
        raise UserError(f"{path} is empty: it holds no text. Name a file with text in it.")


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


def text_of_row(row: dict[str, Any], text_field: str | None, place: str) -> str:
    """Text of one row, empty for null; raises `UserError` if the field is missing or not text."""
    field = text_field or next((name for name in FIELDS if name in row), None)
    if field is None or field not in row:
        wanted = repr(text_field) if text_field else f"any of {', '.join(FIELDS)}"
        raise UserError(
            f"{place} has no field {wanted}; it has {', '.join(map(str, row)) or 'none'}. "
            "Name one with text_field."
        )
    text = row[field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise UserError(
            f"{field!r} in {place} is {type(text).__name__}, not text. Name another text_field."
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can write one half of a surrogate pair
        raise UserError(
            f"{field!r} in {place} is not Unicode text ({one_line(error)}). Repair or remove it."
        ) from error
    return text


def _text(path: Path, file: IO[bytes], _field: str | None) -> Iterator[str]:
    """The one document of a .txt file, in pieces."""
    decoded = io.TextIOWrapper(cast(IO[Any], file), encoding="utf-8-sig", newline="")
    kind: type[str] = str
    pending = ""
    try:
        while text := decoded.read(4 * PIECE_CHARACTERS):
            if "\0" in text:
                raise ValueError("a zero byte")
            *pieces, pending = cut(pending + text)
            for piece in pieces:
                yield kind(piece)
                kind = Continuation
    except ValueError as error:
        raise UserError(
            f"{path} is not UTF-8 text: a bad byte before byte {file.tell():,}. Convert it to "
            "UTF-8, or name a text file."
        ) from error
    yield kind(pending)


def _jsonl(path: Path, file: IO[bytes], text_field: str | None) -> Iterator[str]:
    for number, line in enumerate(file, start=1):
        place = f"{path} line {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except ValueError as error:
            raise UserError(f"{place} is not JSON in UTF-8 ({error}). Fix it.") from error
        if not isinstance(row, dict):
            raise UserError(f"{place} is not a JSON object. Write one object per line.")
        yield text_of_row(row, text_field, place)


def _parquet(path: Path, file: IO[bytes], text_field: str | None) -> Iterator[str]:
    table = pyarrow.parquet.ParquetFile(file)
    wanted = [text_field] if text_field else FIELDS
    # Read only useful columns; without one, read all, so that the error can list their names.
    columns = [name for name in wanted if name in table.schema_arrow.names] or None
    batches = table.iter_batches(batch_size=256, columns=columns)
    rows = chain.from_iterable(batch.to_pylist() for batch in batches)
    for number, row in enumerate(rows, start=1):
        yield text_of_row(row, text_field, f"{path} row {number}")


# --- Python's own library ----------------------------------------------------------------------

Split = Literal["train", "heldout"]
HELDOUT_SHARE = 16
"""One file in this many is held out."""
# Generated character tables and Unicode dumps: long, repetitive, nothing to learn from.
_TABLES = ("encodings/", "pydoc_data/", "lib2to3/pgen2/", "unicodedata", "html/entities.py")
_PACKAGES, _TESTS = {"site-packages", "dist-packages"}, {"test", "tests", "idle_test"}


def stdlib_documents(split: Split, *, include_tests: bool = False) -> Iterator[str]:
    """Source files of this Python's standard library, ordered by a hash of their path.

    The order is the same everywhere, and the first few files are as good a sample as any. The hash
    also selects the held-out files: the embedded model is trained on the others, and the quickstart
    measures it on these, on any machine and Python version. `include_tests` adds the library's own
    test suite, which some distributions do not install.
    """
    root = Path(sysconfig.get_path("stdlib"))
    excluded = _PACKAGES if include_tests else _PACKAGES | _TESTS
    chosen = {}
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        digest = sha256(name.encode()).digest()
        own_split = "heldout" if digest[0] % HELDOUT_SHARE == 0 else "train"
        is_library = not name.startswith(_TABLES) and excluded.isdisjoint(name.split("/")[:-1])
        if own_split == split and is_library:
            chosen[digest] = path
    for _, path in sorted(chosen.items()):
        with suppress(UnicodeDecodeError, OSError):
            text = path.read_text(encoding="utf-8")
            if text.strip():
                yield text
