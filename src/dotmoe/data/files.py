"""Documents of .txt, .jsonl and .parquet files, plain or gzip-compressed."""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import pyarrow
import pyarrow.parquet

from dotmoe.errors import UserError, one_line

PIECE_CHARACTERS = 1 << 16
"""Longest piece of a document that is tokenised at once."""

FIELDS = ("text", "content", "page", "passage", "document")
"""Fields looked for in a row, in this order, where none is named."""

_READ_CHARACTERS = 1 << 18


class Continuation(str):
    """A further piece of the document before it."""

    __slots__ = ()


def file_documents(path: Path, text_field: str | None) -> Iterator[str]:
    """Stream the documents of one file; the format is told by its name.

    Raises:
        UserError: Unknown format, unreadable or damaged file, text that is not UTF-8, bad JSON or
            a missing field (with the place).
    """
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    if suffix not in _READERS:
        raise UserError(
            f"{path} is none of {', '.join(FORMATS)} (.txt and .jsonl also .gz). Convert it to one."
        )
    with _opened(path) as file:
        yield from _READERS[suffix](path, file, text_field)


def cut(text: str) -> Iterator[str]:
    """Pieces of at most `PIECE_CHARACTERS`, cut before a line that starts with a letter or sign.

    Joined they are `text`. At such a place byte-level tokenizers cut too, so the tokens are those
    of the whole; a SentencePiece tokenizer may see one more blank there.
    """
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        end = _cutting_place(text, start)
        yield text[start:end]
        start = end
    yield text[start:]


def text_of_row(row: dict[str, Any], text_field: str | None, place: str) -> str:
    """Text of one row of a table; a null counts as empty.

    Raises:
        UserError: No such field, or one that is not text.
    """
    field = text_field or next((name for name in FIELDS if name in row), None)
    if field is None or field not in row:
        wanted = repr(text_field) if text_field else f"any of {', '.join(FIELDS)}"
        raise UserError(
            f"{place} has no field {wanted}; it has {', '.join(map(str, row)) or 'none'}. "
            "Name one with text_field."
        )
    text = row[field]
    if text is not None and not isinstance(text, str):
        raise UserError(
            f"{field!r} in {place} is {type(text).__name__}, not text. Name another text_field."
        )
    return text or ""


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    is_gzip = path.suffix == ".gz"
    try:
        with cast(IO[bytes], gzip.open(path)) if is_gzip else path.open("rb") as file:
            yield file
    except gzip.BadGzipFile as error:
        raise UserError(
            f"{path} is no sound gzip file ({error}). Remove .gz from its name, or get it again."
        ) from error
    except (EOFError, zlib.error) as error:
        raise UserError(f"{path} is a truncated or damaged gzip file. Get it again.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error


def _text_pieces(path: Path, file: IO[bytes], _field: str | None) -> Iterator[str]:
    """The one document of a .txt file."""
    kind: type[str] = str
    pending = ""
    decoded = io.TextIOWrapper(cast(IO[Any], file), encoding="utf-8-sig", newline="")
    while True:
        try:
            text = decoded.read(_READ_CHARACTERS)
        except UnicodeDecodeError as error:
            raise _not_text(path, f"before byte {file.tell():,}") from error
        if "\0" in text:
            raise _not_text(path, f"before byte {file.tell():,}")
        *pieces, pending = cut(pending + text) if text else (pending, "")
        for piece in filter(None, pieces):
            yield kind(piece)
            kind = Continuation
        if not text:
            return


def _not_text(path: Path, place: str) -> UserError:
    return UserError(
        f"{path} is not UTF-8 text: a bad byte {place}. Convert it to UTF-8, or name a text file."
    )


def _jsonl_rows(path: Path, file: IO[bytes], text_field: str | None) -> Iterator[str]:
    for number, line in enumerate(file, start=1):
        place = f"{path} line {number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            row = json.loads(text) if text.strip() else None
        except UnicodeDecodeError as error:
            raise _not_text(path, f"in line {number}") from error
        except json.JSONDecodeError as error:
            raise UserError(f"{place} is not JSON ({error}). Fix it.") from error
        if not text.strip():
            continue
        if not isinstance(row, dict):
            raise UserError(f"{place} is not a JSON object. One object a line, please.")
        yield text_of_row(row, text_field, place)


def _parquet_rows(path: Path, file: IO[bytes], text_field: str | None) -> Iterator[str]:
    if path.suffix == ".gz":  # parquet is compressed inside, and is read from its end
        raise UserError(f"{path} is a parquet file within gzip. Unpack it with gunzip.")
    try:
        table = pyarrow.parquet.ParquetFile(file)
        number = 0
        # One column is read, so the empty row tells which are there.
        names = dict.fromkeys(table.schema_arrow.names)
        text_of_row(names, text_field, str(path))
        field = text_field or next(name for name in FIELDS if name in names)
        for batch in table.iter_batches(batch_size=256, columns=[field]):
            for row in batch.to_pylist():
                number += 1
                yield text_of_row(row, field, f"{path} row {number}")
    except (pyarrow.ArrowException, OSError) as error:
        cause = one_line(error)[:160].rstrip(".")
        raise UserError(f"{path} is no whole parquet file ({cause}). Get it again.") from error


_READERS: dict[str, Callable[[Path, IO[bytes], str | None], Iterator[str]]] = {
    ".txt": _text_pieces,
    ".jsonl": _jsonl_rows,
    ".parquet": _parquet_rows,
}

FORMATS = tuple(_READERS)


def _cutting_place(text: str, start: int) -> int:
    """End of the piece from `start`: a line end before a visible sign, else any, else a blank."""
    limit = start + PIECE_CHARACTERS
    end = text.rfind("\n", start, limit) + 1
    while end > start and text[end].isspace():
        end = text.rfind("\n", start, end - 1) + 1
    fallbacks = (end, text.rfind("\n", start, limit) + 1, text.rfind(" ", start, limit), limit)
    return next(place for place in fallbacks if place > start)
