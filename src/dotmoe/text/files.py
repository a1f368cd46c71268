"""Files of text: their documents, read in their formats in little memory."""

import codecs
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from dotmoe.common.errors import UserError, one_line
from dotmoe.text.rows import BESIDE_MESSAGES, FIELDS, OF_A_MESSAGE, Document, RowReader, is_message

PIECE_CHARACTERS = 1 << 16
"""Maximum number of characters that are tokenised at once; longer documents are cut."""
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
FORMATS = f".txt, .md, .json, .jsonl (also with {', '.join(COMPRESSIONS)}), .parquet"
"""Files that are read here, in words; `datasets` reads others."""
_READ_CHARACTERS, _HEAD_BYTES = 1 << 20, 1 << 12


def cut(text: str) -> Iterator[str]:
    """Cut text into pieces of at most `PIECE_CHARACTERS`, before lines that start with no blank.

    The pieces joined are `text`. Byte-level tokenizers split at such places too, so the tokens are
    those of the whole text; a SentencePiece tokenizer may see one more blank there.
    """
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        limit = start + PIECE_CHARACTERS
        line = text.rfind("\n", start, limit) + 1
        end = line
        while end > start and text[end].isspace():
            end = text.rfind("\n", start, end - 1) + 1
        # Before a visible character, else at any line end, else at a blank, else anywhere.
        places = (end, line, text.rfind(" ", start, limit), limit)
        end = next(place for place in places if place > start)
        yield text[start:end]
        start = end
    yield text[start:]


def whole_documents(documents: Iterable[Document]) -> Iterator[Document]:
    """The texts of the documents, each in one: parts are joined to what they go on from."""
    parts = list[str]()
    for document in documents:
        if parts and not document.is_continued:
            yield Document("".join(parts))
            parts = []
        parts.append(document.text)
    if parts:
        yield Document("".join(parts))


def documents_in(source: str, files: list[Path], rows: RowReader) -> Iterator[Document]:
    """Stream the documents of files; raises `UserError` if they hold no text at all."""
    is_empty = True
    for path in files:
        for document in file_documents(path, rows):
            is_blank = document.says_nothing or document.text.isspace()
            is_empty = is_empty and is_blank
            yield document
    if is_empty:
        raise UserError(f"{source} is empty: it holds no text. Name a source with text in it.")


def file_documents(path: Path, rows: RowReader) -> Iterator[Document]:
    """Stream the documents of one file, whose suffix gives the format.

    A row that says nothing gives an empty document. Raises `UserError` if the file is unreadable,
    damaged or not text.
    """
    read: Any = reader_of(path)
    compression = COMPRESSIONS.get(path.suffix.lower())
    try:
        with path.open("rb") as raw:
            if compression:
                raw = io.BufferedReader(pyarrow.input_stream(raw, compression=compression), 1 << 20)
            yield from read(path, raw, rows)
    except UnicodeError as error:
        raise UserError(
            f"{path} cannot be read ({one_line(error)[:160]}). Convert it to UTF-8, for example "
            "with iconv, or get it again."
        ) from error
    except (OSError, pyarrow.ArrowException) as error:
        cause = getattr(error, "strerror", None) or one_line(error)[:160].rstrip(".")
        raise UserError(
            f"{path} cannot be read ({cause}). Get it again, or correct its suffix."
        ) from error


# --- formats -----------------------------------------------------------------------------------


def _text(path: Path, file: io.BufferedReader, _rows: RowReader) -> Iterator[Document]:
    """The one document of a file, in the pieces that `cut` makes of the whole."""
    _require_utf8(path, file)
    stream = io.TextIOWrapper(file, encoding="utf-8-sig")  # its line ends become \n
    is_continued = False
    rest = ""
    while part := stream.read(_READ_CHARACTERS):
        if "\0" in part:
            raise _no_utf8(path, "holds NUL bytes, so it is no text in UTF-8")
        *pieces, rest = cut(rest + part)
        for piece in pieces:
            yield Document(piece, is_continued=is_continued)
            is_continued = True
    is_blank = not is_continued and rest.isspace()
    yield Document("" if is_blank else rest, is_continued=is_continued)


def _json(path: Path, file: io.BufferedReader, rows: RowReader) -> Iterator[Document]:
    """Documents of JSON arrays, of objects over several lines, or of one row per line."""
    head = _require_utf8(path, file).removeprefix(codecs.BOM_UTF8).lstrip()
    is_spread = suffix_of(path) == ".json" and _is_spread(head)
    if head.startswith(b"[") or is_spread:
        stream = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        found = _rows_of_arrays(path, iter(lambda: stream.read(_READ_CHARACTERS), ""))
    else:
        found = _rows_of_lines(path, file)
    return (rows.document(row, place) for place, row in found)


def _is_spread(head: bytes) -> bool:
    """Whether the first value of a file goes on after its first line."""
    line, end, _ = head.partition(b"\n")
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return bool(end)
    return False


def _rows_of_lines(path: Path, file: io.BufferedReader) -> Iterator[tuple[str, Any]]:
    """Each row of a file of JSON lines, with its place in words."""
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        place = f"{path} line {number}"
        try:
            yield place, json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise _no_json(place, error) from error


def _rows_of_arrays(path: Path, parts: Iterator[str]) -> Iterator[tuple[str, Any]]:
    """Each row of one JSON array or several, with its place in words."""
    values = _JsonValues(path, parts)
    number = 0
    while values.next_sign():
        for row in values.rows():
            number += 1
            yield f"{path} row {number}", row


class _JsonValues:
    """Reads JSON from text that comes in parts, and holds little more than one row of it."""

    def __init__(self, path: Path, parts: Iterator[str]) -> None:
        self._path = path
        self._parts = parts
        self._text = ""
        self._at = 0

    def rows(self) -> Iterator[Any]:
        """The items of the array that comes next; an array of messages is one row, a chat."""
        if self.next_sign() != "[":
            yield self._value()
            return
        self._at += 1
        if self.next_sign() == "]":
            self._at += 1
            return
        first = self._value()
        if is_message(first):
            yield [first, *self._other_items()]
        else:
            yield first
            yield from self._other_items()

    def next_sign(self) -> str:
        """The next character that is no blank, which stays; empty at the end of the file."""
        while True:
            blanks = _BLANKS.match(self._text, self._at)
            assert blanks, "matches nothing too"
            self._at = blanks.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_on():
                return ""

    def _other_items(self) -> Iterator[Any]:
        """The items of an array after the first, to its end."""
        while (sign := self.next_sign()) == ",":
            self._at += 1
            self.next_sign()
            yield self._value()
        if sign != "]":
            found = repr(sign) if sign else "the end of the file"
            raise _no_json(self._path, f"an array goes on with {found}")
        self._at += 1

    def _value(self) -> Any:
        while True:
            try:
                value, self._at = _DECODER.raw_decode(self._text, self._at)
                return value
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated string")
                is_cut = is_cut or error.pos >= len(self._text) - _LONGEST_SIGN
                if not (is_cut and self._read_on()):
                    raise _no_json(self._path, error.msg) from error
            except RecursionError as error:
                raise _no_json(self._path, error) from error

    def _read_on(self) -> bool:
        """Read at least as much text as is held, so that a long row is not decoded too often."""
        rest = self._text[self._at :]
        read = list[str]()
        size = 0
        for part in takewhile(bool, self._parts):
            read.append(part)
            size += len(part)
            if size > len(rest):
                break
        self._text = rest + "".join(read)
        self._at = 0
        return bool(read)


_DECODER, _BLANKS = json.JSONDecoder(), re.compile(r"\s*")
_LONGEST_SIGN = len("-Infinity") + len(r"\ud83d\ude42")
"""Characters at the end of a part that may be the beginning of one that JSON writes with more."""


def _no_json(place: object, cause: object) -> UserError:
    why = "too deeply nested" if isinstance(cause, RecursionError) else cause
    return UserError(f"{place} is not JSON in UTF-8 ({why}). Fix it.")


def _parquet(path: Path, file: io.BufferedReader, rows: RowReader) -> Iterator[Document]:
    table = pyarrow.parquet.ParquetFile(file)
    present = table.schema_arrow.names
    wanted = [rows.field] if rows.field else [*FIELDS]
    # Read only useful columns; without one, read all, so that the error can list their names.
    columns = [name for name in wanted if name in present] or None
    if columns and not rows.field:  # a row says what else it is or has
        others = (*BESIDE_MESSAGES, *OF_A_MESSAGE)
        columns += [name for name in others if name in present and name not in columns]
    batches = table.iter_batches(batch_size=256, columns=columns)
    read = chain.from_iterable(batch.to_pylist() for batch in batches)
    for number, row in enumerate(read, start=1):
        yield rows.document(row, f"{path} row {number}")


def _require_utf8(path: Path, file: io.BufferedReader) -> bytes:
    """The first bytes of a file, which stay; `UserError` for another encoding, by its name."""
    head = file.peek(_HEAD_BYTES)[:_HEAD_BYTES]
    for mark, name in _MARKS:
        if head.startswith(mark):
            raise _no_utf8(path, f"is {name}, by its byte order mark")
    if b"\0" in head:
        raise _no_utf8(path, f"holds NUL bytes, so it is {_guessed(head)}")
    return head


def _guessed(head: bytes) -> str:
    """What bytes with NULs among them may be, in words."""
    even, odd = head[::2].count(0), head[1::2].count(0)
    if 2 * (even + odd) > len(head):
        return "probably UTF-32"
    if max(even, odd) > 4 * min(even, odd) and max(even, odd) > len(head) / 64:
        end = "big" if even > odd else "little"
        return f"probably UTF-16 ({end}-endian)"
    return "no text in UTF-8"


def _no_utf8(path: Path, why: str) -> UserError:
    return UserError(
        f"{path} {why}. Text is read as UTF-8: convert it, for example with iconv, or write it so."
    )


_MARKS = (  # the mark of UTF-32 begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "UTF-32 (little-endian)"),
    (codecs.BOM_UTF32_BE, "UTF-32 (big-endian)"),
    (codecs.BOM_UTF16_LE, "UTF-16 (little-endian)"),
    (codecs.BOM_UTF16_BE, "UTF-16 (big-endian)"),
)

_Reader = Callable[[Path, io.BufferedReader, RowReader], Iterator[Document]]
_READERS: dict[str, _Reader] = {
    ".txt": _text,
    ".md": _text,
    ".json": _json,
    ".jsonl": _json,
    ".parquet": _parquet,
}


def suffix_of(path: Path) -> str:
    """The suffix of a file in small letters, without that of a compression."""
    plain = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
    return plain.suffix.lower()


def reader_of(path: Path) -> _Reader | None:
    """The reader of a file's format; None for a format that is not read here."""
    return _READERS.get(suffix_of(path))
