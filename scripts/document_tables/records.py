"""JSON files of results, whose keys are attributes, too (`row.perplexity.wiki`)."""

import builtins
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Nothing:
    """A value that a file does not have: false, each member of it is nothing, shown as a dash."""

    def __getattr__(self, name: str) -> "Nothing":
        return self

    def __getitem__(self, key: object) -> "Nothing":
        return self

    def __bool__(self) -> bool:
        return False

    def __format__(self, form: str) -> str:
        return "-"


class Record(dict[str, Any]):
    """A JSON object whose members are attributes, too; `Nothing` where there is no such member."""

    def __missing__(self, name: str) -> Nothing:
        return Nothing()

    def __getattr__(self, name: str) -> Any:
        return self[name]


def load(file: str | Path) -> Any:
    """Content of a JSON file, by its path in the repository; null is as if it were missing."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return json.loads(text, object_pairs_hook=lambda o: Record(p for p in o if p[1] is not None))


def find(rows: Iterable[Any], **wanted: Any) -> Any:
    """The first row that has these values, compared as text; experiment.toml files call it."""
    return next(r for r in rows if all(str(r[n]) == str(v) for n, v in wanted.items()))


FUNCTIONS = {"find": find}
"""What an expression of experiment.toml may call, besides Python's own functions."""


class Scope(Record):
    """Names of an expression; what a file does not have is `Nothing`."""

    def __missing__(self, name: str) -> Nothing:
        if name in FUNCTIONS or hasattr(builtins, name):
            raise KeyError(name)  # Python looks among the functions then
        return Nothing()


def value(expression: str, names: Mapping[str, Any]) -> Any:
    """Value of a Python expression of experiment.toml over the keys of a file and `FUNCTIONS`."""
    return eval(expression, dict(FUNCTIONS), Scope(names))
