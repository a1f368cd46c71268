"""From the names a user gives to a stream of documents."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dotmoe.data.files import FORMATS, Continuation, file_documents, text_of_row
from dotmoe.errors import UserError
from dotmoe.stdlib_text import stdlib_documents

__all__ = ["Continuation", "DataConfig", "documents"]

STDLIB = "python-stdlib"
STDLIB_HELDOUT = "python-stdlib-heldout"

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Text to train or calibrate on."""

    data: tuple[str, ...] = ()
    """Sources, read in this order: .txt (one document a file), .jsonl or .parquet files (one
    document a row), each also as .gz; `python-stdlib` (the source files of this Python's own
    library) or `python-stdlib-heldout` (the sixteenth of them kept apart); or names for the
    `datasets` library, streamed (`allenai/c4:en`: after the colon the configuration)."""
    text_field: str | None = None
    """Field of a row that holds the text. Default: the first of text, content, page, passage,
    document that the rows have."""
    split: str = "train"
    """Split of a `datasets` source; files have none."""
    seq_len: int = 2048
    """Tokens of a block, 2 or more. Paper: 2048. Lowered to the model's context if that is less."""


def documents(config: DataConfig) -> Iterator[str]:
    """Stream the documents of all sources.

    A long .txt file comes in pieces: the first is a plain string, those after it are
    `Continuation`, so that packing knows where a document starts and memory stays bounded.

    Returns:
        An iterator; every named file is known to exist before the first document is asked for.

    Raises:
        UserError: No source named, or one that is missing, empty, damaged or not text; raised
            where reading finds it, with file and line.
    """
    if not config.data:
        raise UserError(
            f"data names no source. Give {', '.join(FORMATS)} files, a datasets name or {STDLIB}."
        )
    streams = [_stream(source, config) for source in config.data]
    return (document for stream in streams for document in stream)


def _stream(source: str, config: DataConfig) -> Iterator[str]:
    if source == STDLIB:
        return stdlib_documents("train")
    if source == STDLIB_HELDOUT:
        return stdlib_documents("heldout")
    path = Path(source).expanduser()
    if path.is_file():
        return _never_empty(path, file_documents(path, config.text_field))
    named_as_file = source.removesuffix(".gz").endswith(FORMATS) or source.endswith(".gz")
    if not path.is_dir() and (named_as_file or not _HUB_NAME.fullmatch(source)):
        raise UserError(f"{source} does not exist.{_nearest(path)} Name an existing file.")
    return _dataset_documents(source, config)


def _nearest(path: Path) -> str:
    beside = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, beside, n=1)
    return f" Did you mean {path.parent / near[0]}?" if near else ""


def _never_empty(path: Path, stream: Iterator[str]) -> Iterator[str]:
    empty = True
    for document in stream:
        empty = empty and not document.strip()
        yield document
    if empty:
        raise UserError(f"{path} is empty: it holds no text. Name a file with text in it.")


def _dataset_documents(source: str, config: DataConfig) -> Iterator[str]:
    # Importing datasets takes seconds, and local files do not need it.
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    is_folder = Path(source).expanduser().is_dir()
    name, _, part = (source, "", "") if is_folder else source.partition(":")
    try:
        rows = load_dataset(name, part or None, split=config.split, streaming=True)
        for number, row in enumerate(rows, start=1):
            yield text_of_row(dict(row), config.text_field, f"row {number} of {source}")
    except UserError:
        raise
    except (OSError, ValueError, DatasetGenerationError) as error:
        near = "" if is_folder else _nearest(Path(source))
        raise UserError(
            f"{source} ({config.split}) cannot be read by datasets: {_one_line(error)}. "
            f"Check the name, the split and the network.{near}"
        ) from error


def _one_line(error: Any) -> str:
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
