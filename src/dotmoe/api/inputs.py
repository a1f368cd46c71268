"""Models and texts that Python code holds in memory, as files that a run can read again.

Names of the files end in digits of their content: the same content is the same file, so that a
repeated call resumes its run, and other content is another input, which the run refuses.
"""

import datetime
import decimal
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from dotmoe.common.distributed import require_one_process
from dotmoe.common.errors import UserError, one_line
from dotmoe.common.files import read_json, remove, sha256_of, write_json
from dotmoe.models.identity import fingerprint
from dotmoe.models.stock import forget_versions, quiet_transformers
from dotmoe.text.files import reader_of

_DIGITS = 12
_PARTIAL = ".partial-"
"""Prefix of what is being written, by a call of its own."""
_STALE_S = 86_400
"""Seconds after which the call that was writing is taken to be stopped."""
_AS_TEXT = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID)
"""Values of rows that JSON has not, and that say the same as text."""
_TOKENIZER = "Give its tokenizer as well, as AutoTokenizer loads it: tokenizer=..."


def source_names(given: Any) -> tuple[str, ...]:
    """The sources that a value names; empty if it is text or chats, or names and texts mixed."""
    several = [given] if isinstance(given, str | os.PathLike) else given
    if not isinstance(several, list | tuple) or not all(map(_names_a_source, several)):
        return ()
    return tuple(map(os.fspath, several))


class Inputs:
    """Writes what is in memory into one folder, and knows what it has written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()  # a run outlives the directory that its call was made in
        self.written: list[Path] = []
        """What was not there before."""

    def model_folder(self, model: Any, tokenizer: Any) -> str:
        """Folder of a checkpoint: a path or hub name as it is, a loaded model as it was written.

        Raises a `UserError` for anything else, and for a loaded model whose weights are not all
        its own and in memory, or whose tokenizer is not given.
        """
        if isinstance(model, str | os.PathLike):
            if tokenizer is not None:
                raise UserError(
                    f"tokenizer is given, but model is {os.fspath(model)!r}, which has its own. "
                    "Leave tokenizer out, or give the loaded model."
                )
            return os.fspath(model)
        _require_whole(model)
        if not hasattr(tokenizer, "save_pretrained"):
            raise UserError(f"model is a {type(model).__name__} without a tokenizer. {_TOKENIZER}")
        partial = self._partial()
        partial.mkdir()
        try:
            with quiet_transformers():
                model.save_pretrained(partial)
                tokenizer.save_pretrained(partial)
                forget_versions(partial)
                _forget_last_call(partial / "tokenizer.json")
        except (ValueError, RuntimeError) as error:  # such as an invalid generation_config
            raise UserError(
                f"model is a {type(model).__name__} that Transformers cannot save "
                f"({one_line(error)}). Mend that, or give its folder or hub name."
            ) from error
        given = Path(model.name_or_path).name or model.config.model_type
        name = re.sub(r"[^\w.-]+", "-", given, flags=re.ASCII)
        return str(self._named(partial, name, fingerprint(partial), ""))

    def config_folder(self, model: Any) -> str:
        """As `model_folder`, for what reads no weights: a loaded model is written as its config."""
        if isinstance(model, str | os.PathLike):
            return os.fspath(model)
        _require_whole(model)
        partial = self._partial()
        model.config.save_pretrained(partial)
        return str(partial)

    def text_sources(self, given: Any, option: str) -> tuple[str, ...]:
        """Sources of text: names as they are, texts and chats as a JSONL file of their rows.

        A string names a source, unless it is text: it has more than one line, or has blanks and is
        neither a file nor named like one. Raises a `UserError` for names and texts mixed, for no
        rows, and for a row that JSON cannot hold.
        """
        if names := source_names(given):
            return names
        if isinstance(given, str | os.PathLike):
            given = [given]
        if isinstance(given, list | tuple):
            is_name = [_names_a_source(each) for each in given]
            if any(is_name):
                name = os.fspath(given[is_name.index(True)])
                raise UserError(
                    f"{option} has names of sources, such as {name!r}, and texts in one list. Give "
                    "either names alone or texts alone."
                )
        if isinstance(given, Mapping | Set) or not isinstance(given, Iterable):
            raise UserError(
                f"{option} is a {type(given).__name__}, but must be a source, a list of sources, a "
                "Dataset or DataFrame, or texts or chats to iterate over in their order. Of a "
                "DatasetDict, name one split."
            )
        partial = self._partial()
        rows = 0
        with partial.open("w", encoding="utf-8", newline="\n") as file:
            for row in _rows(_rows_of_table(given), option):
                file.write(row + "\n")
                rows += 1
        if not rows:
            remove(partial)
            raise UserError(f"{option} has no rows. Give texts, or leave {option} out.")
        return (str(self._named(partial, "text", sha256_of(partial), ".jsonl")),)

    def forget(self) -> None:
        """Remove what was written and no run has begun with, and folders that are empty then."""
        if not self.written:
            return
        out = self.folder.parent
        manifests = [*out.glob("manifest.json"), *out.glob("*/manifest.json")]
        known = "".join(path.read_text(encoding="utf-8") for path in manifests)
        for path in self.written:
            if path.name not in known:
                remove(path)
        for folder in (self.folder, out):
            with suppress(OSError):  # it is not empty, or a link or a place where a disk is mounted
                folder.rmdir()

    def without_paths(self, message: str) -> str:
        """A message that says what was given, where it names a file that is not there any more."""
        for path in self.written:
            if path.exists():
                continue
            what = "the given text" if path.suffix == ".jsonl" else "the loaded model"
            place = re.escape(str(path))
            message = re.sub(rf"{place}/([\w.-]*\w)", rf"\1 of {what}", message)
            message = re.sub(place, what, message)
        return message

    def _partial(self) -> Path:
        """A path in the folder for what is being written: another call may write there as well."""
        require_one_process("a model or text in memory")
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(f"{_PARTIAL}*"):
            if time.time() - left.stat().st_mtime > _STALE_S:
                remove(left)
        partial = self.folder / f"{_PARTIAL}{uuid.uuid4().hex}"
        self.written.append(partial)
        return partial

    def _named(self, partial: Path, name: str, sha256: str, suffix: str) -> Path:
        """The path of finished content: what is there already, or else what was just written."""
        path = self.folder / f"{name}-{sha256[:_DIGITS]}{suffix}"
        if path.exists():
            remove(partial)
            return path
        shutil.move(partial, path)
        self.written.append(path)
        return path


def _require_whole(model: Any) -> None:
    """Refuse what is no model of Transformers that can be saved as it is."""
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        remedy = "Give a folder, a hub name or a model that Transformers has loaded."
        if hasattr(model, "merge_and_unload"):
            remedy = "Merge its adapter first: model.merge_and_unload()."
        raise UserError(f"model is a {kind}, which is no model of Transformers. {remedy}")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise UserError(f"model is a {kind} with an adapter. Merge the adapter first.")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UserError(
            f"model is a {kind} whose weights are not all in memory. Load it without offloading, "
            "or give its folder or hub name."
        )


def _names_a_source(item: Any) -> bool:
    """Whether an item of a list is the name of a source, not a text, chat or row."""
    if isinstance(item, os.PathLike):
        return True
    if not isinstance(item, str):
        return False
    if "\n" in item:
        return False
    place = item.partition("#")[0].partition("@")[0]
    is_like_a_file = reader_of(Path(place)) is not None or place.startswith(
        ("/", "./", "../", "~/")
    )
    has_blanks = re.search(r"\s", item.strip()) is not None
    return not has_blanks or is_like_a_file or os.path.exists(place)


def _forget_last_call(tokenizer_file: Path) -> None:
    """Take truncation and padding out of a tokenizer's file: its last call left them there."""
    if tokenizer_file.is_file():
        values = read_json(tokenizer_file)
        write_json(tokenizer_file, {**values, "truncation": None, "padding": None})


def _rows_of_table(given: Iterable[Any]) -> Iterable[Any]:
    """Rows of a DataFrame of pandas or polars, which iterates over its columns; else as given."""
    if hasattr(given, "to_dicts"):
        return given.to_dicts()  # type: ignore[no-any-return]
    if hasattr(given, "to_dict") and hasattr(given, "columns"):
        filled = given.astype(object).where(given.notna(), None)  # type: ignore[attr-defined]
        return filled.to_dict("records")  # type: ignore[no-any-return]
    return given


def _rows(given: Iterable[Any], option: str) -> Iterator[str]:
    """Each text, chat or row as a line of JSON."""
    for number, item in enumerate(given, 1):
        row = item
        if isinstance(item, str):
            row = {"text": item}
        elif isinstance(item, list | tuple):
            row = {"messages": list(item)}
        elif not isinstance(item, Mapping):
            raise UserError(
                f"row {number} of {option} is a {type(item).__name__}, but must be a text, a chat "
                "(a list of messages) or a row (a dict)."
            )
        try:
            line = json.dumps(row, ensure_ascii=False, default=_plain)
            line.encode("utf-8")  # half of a surrogate pair is no character
        except (TypeError, UnicodeEncodeError) as error:
            raise UserError(
                f"row {number} of {option} cannot be written as JSON in UTF-8 "
                f"({one_line(error)}). Mend the row, or remove that column."
            ) from error
        yield line


def _plain(value: Any) -> Any:
    """What JSON can hold of a value of a row; raises a `TypeError` for values that it cannot."""
    if isinstance(value, _AS_TEXT):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value is a {type(value).__name__}")
