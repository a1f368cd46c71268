"""The options of a command: one `Option` for each field of its config, with its help text.

A config class says everything: the names of fields, their types and defaults, and in the string
below a field what it is for. Parser and help are made from this one list.
"""

import ast
import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from dotmoe.common.errors import UserError, nearest
from dotmoe.common.options import (
    ARGUMENT,
    HIDDEN,
    REQUIRED,
    Need,
    Shown,
    defaults_of,
    marked_fields,
    option_of,
)

_WORDS = {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH"}
_KINDS = {int: "a whole number", float: "a number", Path: "a path"}
_MOST_CHOICES = 40
"""Characters of choices that stand beside the name of an option; more are listed in its text."""


class Option(NamedTuple):
    """One field of a config, as a command line gives it."""

    name: str
    """Name of the field."""
    group: str
    """Name of the nested config that holds it; empty: the config itself."""
    kinds: tuple[Any, ...]
    """What a word of its value may be: types, or words that stand for themselves."""
    takes_many: bool
    """Whether any number of words follows."""
    is_optional: bool
    """Whether it may be None."""
    is_required: bool
    """Whether its class gives it no default."""
    default: Any
    help: str
    word: str = ""
    """What help calls its value, if not by its type."""
    is_argument: bool = False
    """Whether it is given by its place, not by its name."""

    @property
    def typed(self) -> str:
        """The option as it is typed, or the name of an argument."""
        if self.is_argument:
            return self.name.upper()
        return option_of(self.name)

    @property
    def is_flag(self) -> bool:
        """Whether it is switched on and off, without a value."""
        return self.kinds == (bool,)

    @property
    def choices(self) -> list[str]:
        """The words that it takes, if these are all."""
        plain = [kind for kind in self.kinds if isinstance(kind, str)]
        return plain if len(plain) == len(self.kinds) else []

    @property
    def shown(self) -> str:
        """The option and its value, as help shows them."""
        if self.is_argument:
            return self.typed
        if self.is_flag:
            return f"{self.typed}, --no-{self.typed[2:]}"
        words = [kind if isinstance(kind, str) else _WORDS[kind] for kind in self.kinds]
        word = self.word or "|".join(words)
        if self.choices and len(word) > _MOST_CHOICES:
            word = "NAME"
        return f"{self.typed} {word} ..." if self.takes_many else f"{self.typed} {word}"

    def text(self, needs: Sequence[Need] = ()) -> str:
        """What it is for, its choices, what it needs, and its default, in one paragraph."""
        parts = [self.help]
        if self.choices and "|" not in self.shown and not self.word:
            parts.append(f"One of {', '.join(self.choices)}.")
        parts += [f"Only with {need.needs}." for need in needs if self.name in need.options]
        default = self.default
        if isinstance(default, tuple):
            default = " ".join(map(str, default))
        if default is not None and default != "" and default is not REQUIRED:
            parts.append(f"(default: {default})")
        return " ".join(filter(None, parts))

    def value(self, given: Any) -> Any:
        """The value that a word means, or a list of words; raises a `UserError` if it does not fit.

        A flag is given as True or False.
        """
        if self.is_flag:
            return given
        words = given if isinstance(given, list) else [given]
        if self.is_optional and words == ["None"]:
            return None
        values = tuple(self._one(word) for word in words)
        return values if self.takes_many else values[0]

    def _one(self, word: str) -> Any:
        if not word and self.name != "prompts":  # a tokenizer may begin an empty prompt
            raise UserError(f"{self.typed} is empty. Give it: {self.help}")
        for kind in self.kinds:
            if kind == word:
                return word
            if isinstance(kind, type):
                try:
                    return kind(word)
                except ValueError:
                    continue
        if self.choices:
            names = ["None", *self.choices] if self.is_optional else self.choices
            raise UserError(
                f"{self.typed} is {word!r}. Expected one of {', '.join(names)}."
                f"{nearest(word, names)}"
            )
        kinds = [kind if isinstance(kind, str) else _KINDS[kind] for kind in self.kinds]
        percent = word.removesuffix("%")
        hint = ""
        if percent != word and percent.isdecimal():
            hint = f" Did you mean {int(percent) / 100:g}?"
        raise UserError(f"{self.typed} is {word!r}, but it must be {' or '.join(kinds)}.{hint}")


def options_of(cls: Any, start: Any = None, group: str = "") -> Iterator[Option]:
    """Yield the options of a config class in order; `start` is a config with their defaults."""
    texts = texts_of(cls)
    own_defaults, defaults = defaults_of(cls, None), defaults_of(cls, start)
    nested = list[tuple[Any, Any, str]]()
    for name, kind, marks in marked_fields(cls):
        if HIDDEN in marks:
            continue
        if dataclasses.is_dataclass(kind):
            nested.append((kind, defaults[name], name))
            continue
        kinds = [part for part in _parts(kind) if part is not None]
        takes_many = typing.get_origin(kinds[0]) is tuple
        if takes_many:
            kinds = list(_parts(typing.get_args(kinds[0])[0]))
        yield Option(
            name=name,
            group=group,
            kinds=tuple(kinds),
            takes_many=takes_many,
            is_optional=None in _parts(kind),
            is_required=own_defaults[name] is REQUIRED,
            default=defaults[name],
            help=texts.get(name, ""),
            word=next((mark.word for mark in marks if isinstance(mark, Shown)), ""),
            is_argument=ARGUMENT in marks,
        )
    for kind, default, name in nested:
        yield from options_of(kind, None if default is REQUIRED else default, name)


def summary_of(cls: Any) -> str:
    """First sentence of the docstring of a config class, on one line."""
    return " ".join((cls.__doc__ or "").split("\n\n")[0].split())


@lru_cache
def texts_of(cls: type) -> dict[str, str]:
    """Help text of each field of a config class: the string below it in the source, on one line.

    A field that a subclass defines without a text keeps that of the base class.
    """
    texts = dict[str, str]()
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            for statement, below in pairwise(_class_body(base)):
                if isinstance(statement, ast.AnnAssign) and isinstance(below, ast.Expr):
                    assert isinstance(statement.target, ast.Name)
                    text = ast.literal_eval(below.value)
                    texts[statement.target.id] = " ".join(text.split())
    return texts


def _class_body(cls: type) -> list[ast.stmt]:
    for node in _module_tree(cls.__module__).body:
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
            return node.body
    return []


@lru_cache
def _module_tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[module]))


def _parts(kind: Any) -> Iterator[Any]:
    """Yield the types and literal values that a type is a union of; None for `NoneType`."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        yield from _parts(parts[0])
    elif origin in (typing.Union, types.UnionType):
        for part in parts:
            yield from _parts(part)
    elif origin is Literal:
        yield from parts
    else:
        yield None if kind is types.NoneType else kind
