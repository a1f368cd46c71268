"""From the names a user gives to weighted sources, and to streams of documents in files."""

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
"""Source name of text sampled from the dense model, which only a conversion can make."""
STDLIB, STDLIB_HELDOUT = "python-stdlib", "python-stdlib-heldout"
PIECE_CHARACTERS = 1 << 16
"""Longest piece of a document that is tokenised at once."""
FIELDS = ("text", "content", "page", "passage", "document")
"""Fields looked for in a row, in this order, where none is named."""
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
"""Percent of the tokens, by configuration of the data set."""


class Continuation(str):
    """A further piece of the document before it."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Text to train or calibrate on."""

    data: tuple[str, ...] = ()
    """Sources, read in this order: .txt (one document a file), .jsonl or .parquet files (one
    document a row), the first two also as .gz; `python-stdlib` (the source files of this Python's
    own library) or `python-stdlib-heldout` (the sixteenth of them kept apart); names for the
    `datasets` library, streamed (`allenai/c4:en`: after the colon the configuration); `dolmino`
    (the paper's mix, from the hub; `dolmino:FOLDER`: a copy on this machine); or `self`: text that
    the dense model itself samples. `SOURCE@SPLIT#FIELD` gives one source a split and a text field
    of its own."""
    data_weights: tuple[Annotated[float, above(0)], ...] = ()
    """Mix the sources: the share of each in the tokens, one number a source, of any sum. One that
    has run out is not read again, and the others go on in their proportions. Default: one source
    after the other."""
    shuffle_buffer: Annotated[int | None, at_least(0)] = None
    """Documents of a source that are held back and drawn from at random; 0: its own order. With
    `datasets` also the order of the files that make up the source. Default: 10000 for `dolmino`,
    else 0."""
    data_seed: Annotated[int, at_least(0)] = 0
    """Of the shuffle buffer, and of text sampled from the dense model."""
    text_field: str | None = None
    """Field of a row that holds the text. Default: the first of text, content, page, passage,
    document that the rows have."""
    split: str = "train"
    """Split of a `datasets` source; files have none."""
    seq_len: Annotated[int, at_least(2)] = 2048
    """Tokens of a block, 2 or more. Paper: 2048. Lowered to the model's context if that is less."""

    @property
    def holds_dolmino(self) -> bool:
        """Whether a source is the paper's mix, which is read by weights of its own."""
        return any(map(_is_dolmino, self.data))

    @property
    def is_mix(self) -> bool:
        """Whether sources are read side by side, by their weights."""
        return bool(self.data_weights) or self.holds_dolmino


def documents(config: DataConfig) -> Iterator[str]:
    """Stream the documents of all sources, one source after the other.

    A long .txt file comes in pieces, those after the first as `Continuation`. Raises a `UserError`:
    a mix, or a source that is not there; while reading, one that is empty, damaged or not text.
    """
    if config.is_mix:
        raise UserError(
            f"{', '.join(config.data)} is a mix, which is for training. Name files or a data set."
        )
    return chain.from_iterable([opened(name, config) for name, _ in sources_of(config)])


def sources_of(config: DataConfig) -> list[tuple[str, float | None]]:
    """Every source with its share of the tokens, `dolmino` taken apart; None: read in order.

    Raises a `UserError`: no source, weights that do not fit them, or a source that is not there.
    """
    names = config.data
    if not names:
        raise UserError(
            f"data names no source. Give {', '.join(FORMATS)} files, a datasets name or {STDLIB}."
        )
    if SELF in names:
        raise UserError(
            f"{SELF} is text to train on, sampled from the dense model, and cannot be mixed or "
            f"measured on. Give it alone, or name a text. (A folder: ./{SELF})"
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
    """Stream the documents of one source, or refuse it by a `UserError` if it is not there."""
    name, split, field = source, "", ""
    if not _is_there(name):
        name, _, field = name.partition("#")
    if not _is_there(name):
        name, _, split = name.partition("@")
    split, text_field = split or config.split, field or config.text_field
    size = config.shuffle_buffer
    if size is None:  # the files of the mix are sorted by origin
        size = 10_000 if config.holds_dolmino else 0
    digest = sha256(f"{config.data_seed}/0/{source}".encode()).digest()
    seed = int.from_bytes(digest[:4], "little")
    if name in (STDLIB, STDLIB_HELDOUT):
        return shuffled(stdlib_documents("train" if name == STDLIB else "heldout"), size, seed)
    path = Path(os.path.expanduser(name))
    if os.path.isfile(path):
        return shuffled(file_documents(path, text_field), size, seed)
    if os.path.isdir(path):
        name = str(path)
    elif name.endswith((*FORMATS, ".gz")) or not _HUB_NAME.fullmatch(name):
        siblings = path.parent.iterdir() if os.path.isdir(path.parent) else ()
        near = nearest(str(path), map(str, siblings))
        raise UserError(f"{name} does not exist.{near} Name an existing file.")
    return _dataset_documents(name, split, text_field, size, seed)


def shuffled(stream: Iterable[str], size: int, seed: int) -> Iterator[str]:
    """Documents, or pieces of long ones, in an order of the seed: drawn from `size` held back."""
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
    """Methods of `Path` would raise where there is no such user, or the name is too long."""
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
        package = " Files of .zst need: pip install zstandard." if "zstd" in cause.lower() else ""
        raise UserError(
            f"{source} ({split}) cannot be read by datasets: {cause}. "
            f"Check the name, the split and the network.{package}"
        ) from error


def _is_dolmino(name: str) -> bool:
    """A file or folder of that very name is none."""
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
    """Stream the documents of one file; the format is told by its name.

    Raises a `UserError`: unknown format, or a file that is unreadable, damaged, empty or not text.
    """
    name = path.name.lower()
    if not name.endswith(FORMATS):
        raise UserError(f"{path} is none of {', '.join(FORMATS)}. Convert it to one.")
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
            f"{path} cannot be read ({cause}). Get it again, or name it by its format."
        ) from error
    if is_empty:
        raise UserError(f"{path} is empty: it holds no text. Name a file with text in it.")


def cut(text: str) -> Iterator[str]:
    """Pieces of at most `PIECE_CHARACTERS`, cut before a line that starts with a letter or sign.

    Joined they are `text`. At such a place byte-level tokenizers cut too, so the tokens are those
    of the whole; a SentencePiece tokenizer may see one more blank there.
    """
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        limit = start + PIECE_CHARACTERS
        line = end = text.rfind("\n", start, limit) + 1
        while end > start and text[end].isspace():
            end = text.rfind("\n", start, end - 1) + 1
        # Before a visible sign, else at any line end, else at a blank, else anywhere.
        places = (end, line, text.rfind(" ", start, limit), limit)
        end = next(place for place in places if place > start)
        yield text[start:end]
        start = end
    yield text[start:]


def text_of_row(row: dict[str, Any], text_field: str | None, place: str) -> str:
    """Text of one row of a table; a null counts as empty. A `UserError`: no such field or text."""
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
            raise UserError(f"{place} is not a JSON object. One object a line, please.")
        yield text_of_row(row, text_field, place)


def _parquet(path: Path, file: IO[bytes], text_field: str | None) -> Iterator[str]:
    table = pyarrow.parquet.ParquetFile(file)
    wanted = [text_field] if text_field else FIELDS
    # Columns of no use are not read; where there is none, the first row says which there are.
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
    """Source files of this Python's standard library, ordered by a hash of the path inside it.

    So the order is the same everywhere, and the first few are as good a sample as any. The hash
    also says which are held out: the embedded model is trained on the others, and the quickstart
    measures it on these, on any machine and Python version. With tests, the library's own test
    suite is among them, which some distributions do not install.
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
