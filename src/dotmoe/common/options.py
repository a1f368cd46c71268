"""Checks and JSON form of config dataclasses, whose fields are annotated with their ranges:

    num_steps: Annotated[int, at_least(1), HOW] = 100

Rules across fields go into a method `check_together()` that raises `UserError`. Options that have
an effect only together with others are in the table `needs` of the config of a command.
"""

import dataclasses
import json
import math
import os
import reprlib
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Annotated, Any, NamedTuple, TypeVar

from dotmoe.common.errors import UserError, nearest

COMMAND = "command"
"""Key in a config's JSON values that holds its command, for classes that define `command`."""

HOW = object()
"""Marks a field that affects how a result is made, not what it is; it may change on resume."""

ARGUMENT = object()
"""Marks a field that a command line gives by its place, not by its name."""
HIDDEN = object()
"""Marks a field that is no option, neither of the command line nor in Python."""

PLACE = object()
"""Marks a field that names a folder or file of the user: `~` in it stands for the home."""

REQUIRED = dataclasses.MISSING
"""Default of an option that has none."""

Config = TypeVar("Config")


class Shown(NamedTuple):
    """Marks a field whose value help calls by this word, such as FOLDER."""

    word: str


class Range(NamedTuple):
    """Numbers that a field may have, or each number if the field is a tuple."""

    words: str
    contains: Callable[[float], bool]


def above(low: float) -> Range:
    """Numbers greater than `low`."""
    return Range(f"above {low:g}", lambda number: number > low)


def at_least(low: float) -> Range:
    """`low` and greater numbers."""
    return Range(f"at least {low:g}", lambda number: number >= low)


def at_most(high: float) -> Range:
    """`high` and smaller numbers."""
    return Range(f"at most {high:g}", lambda number: number <= high)


def between(low: float, high: float) -> Range:
    """`low`, `high` and the numbers between."""
    return Range(f"{low:g} to {high:g}", lambda number: low <= number <= high)


class Need(NamedTuple):
    """Options of a command that have an effect only if its config has what they need."""

    options: tuple[str, ...]
    needs: str
    """What they need, as a user gives it: `--method lte`. Help and errors show it."""
    holds: Callable[[Any], bool]
    """Whether a config of the command has it."""
    error: str = "{option} is {value}, but it is for {needs} alone. Give {needs} as well"
    """What is wrong and the remedy; `config` can be named in it, too."""
    unless: str = ""
    """An option that, where it is given as well, shows that the user knows: `--steps 0`."""


def without_effect(config: Any, given: Iterable[str]) -> Iterator[tuple[str, Need]]:
    """Yield each of these options, which were given, that has no effect in a config, and why."""
    given = set(given)
    for need in getattr(config, "needs", ()):
        if need.unless in given or need.holds(config):
            continue
        yield from ((name, need) for name in need.options if name in given)


def require_effect(config: Any, given: Iterable[str], file: str = "") -> None:
    """Raise a `UserError` if one of these options, which were given, has no effect in a config.

    `file` is the JSON file that gives them, if it is not the command line.
    """
    for name, need in without_effect(config, given):
        option = f"{name} in {file}" if file else option_of(name)
        sentence = need.error.format(
            option=option, value=_as_typed(flat(config)[name]), needs=need.needs, config=config
        )
        raise UserError(f"{sentence}, or leave {option} out.")


def changed(config: Any, start: Any = None) -> set[str]:
    """Names of the options whose value is not that of `start`, or not the default without one."""
    before = _defaults(type(config)) if start is None else flat(start)
    return {name for name, value in flat(config).items() if value != before[name]}


def flat(config: Any) -> dict[str, Any]:
    """Values of a config by the names of its options, with those of the configs nested in it."""
    values = dict[str, Any]()
    for field in fields(config):
        value = getattr(config, field.name)
        values |= flat(value) if dataclasses.is_dataclass(value) else {field.name: value}
    return values


def _defaults(cls: Any) -> dict[str, Any]:
    """Defaults of a config class by the names of its options."""
    values = {field.name: field.default for field in fields(cls)}
    for _, kind, _ in marked_fields(cls):
        if dataclasses.is_dataclass(kind):
            values |= _defaults(kind)
    return values


def option_of(name: str) -> str:
    """The option of a field of a config, as it is typed."""
    return "--" + name.replace("_", "-")


def check(config: Any, given: Iterable[str] = ()) -> None:
    """Raise a `UserError` if a number in a config, or in a config nested in it, is out of range.

    None is in every range, infinity in none. Each of the `given` options must have an effect. Then
    `check_together` checks rules across fields.
    """
    for name, kind, marks in marked_fields(type(config)):
        value = getattr(config, name)
        if dataclasses.is_dataclass(kind):
            check(value)
            continue
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, int | float) and not isinstance(each, bool):
                _require_in_range(name, each, marks)
    require_effect(config, given)
    if hasattr(config, "check_together"):
        config.check_together()


def _require_in_range(name: str, number: float, marks: Iterable[Any]) -> None:
    """Raise a `UserError` unless a number is finite and in each `Range` among an option's marks."""
    if not math.isfinite(number):
        raise UserError(f"{name} is {number}, but it must be a finite number.")
    for mark in marks:
        if isinstance(mark, Range) and not mark.contains(number):
            is_share = mark.words == "at most 1" and 10 <= number <= 100
            hint = f" Did you mean {number / 100:g}?" if is_share else ""
            raise UserError(f"{name} is {number}, but it must be {mark.words}.{hint}")


def defaults_of(cls: Any, start: Any) -> dict[str, Any]:
    """Default of each field: that of a config, or of the class; `REQUIRED` if there is none."""
    found = dict[str, Any]()
    for field in fields(cls):
        if start is not None:
            found[field.name] = getattr(start, field.name)
        elif field.default_factory is not REQUIRED:
            found[field.name] = field.default_factory()
        else:
            found[field.name] = field.default
    return found


def built(cls: Any, start: Any, values: dict[str, Any]) -> Any:
    """A config of a class: these values by the names of options, the others as in `start`."""
    found = dict[str, Any]()
    defaults = defaults_of(cls, start)
    for name, kind, marks in marked_fields(cls):
        if dataclasses.is_dataclass(kind):
            inner = None if defaults[name] is REQUIRED else defaults[name]
            found[name] = built(kind, inner, values)
        elif name in values:
            found[name] = _with_home(marks, values[name])
        elif defaults[name] is not REQUIRED:
            found[name] = defaults[name]
    return cls(**found)


def _with_home(marks: Collection[Any], value: Any) -> Any:
    """The value of a field with these marks; of a `PLACE` with the home for `~` or `~user`."""
    return os.path.expanduser(value) if PLACE in marks and isinstance(value, str) else value


def in_python(cls: Any, values: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Values that Python code gave, by the names of options, as the fields of a config hold them.

    A path becomes text, a list or one value for a field of several becomes a tuple. Raises a
    `UserError` for a name that is no option of `place`, and for a value of a wrong type.
    """
    kinds = _kinds_by_option(cls)
    found = dict[str, Any]()
    for name, value in values.items():
        if name not in kinds:
            hint = nearest(name, kinds) or " Leave it out."
            raise UserError(f"{name} is no option of {place}.{hint}")
        found[name] = _as_held(kinds[name], value, name)
    return found


def _kinds_by_option(cls: Any) -> dict[str, Any]:
    """Type of each field that is an option by the option's name, with those of nested configs."""
    kinds = dict[str, Any]()
    for name, kind, marks in marked_fields(cls):
        if dataclasses.is_dataclass(kind):
            kinds |= _kinds_by_option(kind)
        elif HIDDEN not in marks:
            kinds[name] = kind
    return kinds


def _as_held(kind: Any, value: Any, name: str) -> Any:
    """A value as a field of this type holds it."""
    held = _plain(value)
    if _fits(held, kind):
        return held
    held = held if isinstance(held, tuple) else (held,)  # one value for a field of several
    if not _fits(held, kind):
        hint = nearest(str(held[0]), _choices(kind)) if held else ""
        raise UserError(f"{name} is {reprlib.repr(value)}, but it must be {_in_words(kind)}.{hint}")
    return held


def _choices(kind: Any) -> list[str]:
    """Every word that a value of this type, or a part of it, may be."""
    if isinstance(kind, str):
        return [kind]
    return [word for part in typing.get_args(kind) for word in _choices(part)]


def _plain(value: Any) -> Any:
    """Paths as text, lists and ranges as tuples, numbers of NumPy and tensors as plain ones."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple | range):
        return tuple(_plain(item) for item in value)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()
    return value


def _in_words(kind: Any) -> str:
    """What a value of a type is: `a number or None`."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _in_words(parts[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_in_words, parts))
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, parts))}"
    if origin is tuple:
        return f"{_in_words(parts[0])}, or a list of such values"
    return _NAMES.get(kind, str(kind))


_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "text or a path",
    bool: "True or False",
    types.NoneType: "None",
}


def checked(config: Config) -> Config:
    """A copy of a config made in Python, checked; lists as tuples, paths as text, no empty text.

    Every option that is not at its default must have an effect. Configs of runs come from recipes,
    which check that themselves.
    """
    marks_of = {name: marks for name, _, marks in marked_fields(type(config))}
    values = {name: value for name, value in values_of(config).items() if value != ""}
    given = {name: _with_home(marks_of.get(name, ()), value) for name, value in values.items()}
    config = from_values(type(config), given, "the config")
    check(config, () if hasattr(config, COMMAND) else changed(config))
    return config


def values_of(config: Any) -> dict[str, Any]:
    """A config, defaults included, as plain JSON values; with its command, if it has one."""
    values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    command = getattr(config, COMMAND, None)
    return values if command is None else {COMMAND: command, **values}


def what_is_made(config: Any) -> dict[str, Any]:
    """A config's values without those marked `HOW`: equal for runs that have the same result."""
    names = [name for name, _, marks in marked_fields(type(config)) if HOW not in marks]
    values = {name: getattr(config, name) for name in names}
    return {n: what_is_made(v) if dataclasses.is_dataclass(v) else v for n, v in values.items()}


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The options that differ between two results of `what_is_made`, as `name (old, not new)`."""
    plain, nested = list[str](), list[str]()
    for name, value in old.items():
        if isinstance(value, dict):
            nested += differences(value, new[name])
        elif value != new[name]:
            plain.append(f"{name} ({_as_typed(value)}, not {_as_typed(new[name])})")
    return plain + nested


def _as_typed(value: Any) -> str:
    """A value as the command line has it: several with blanks between them."""
    if isinstance(value, tuple | list):
        return " ".join(map(str, value)) or "none"
    return str(value)


def from_values(cls: type[Config], values: Any, place: str) -> Config:
    """A config from plain JSON values; missing fields take their defaults.

    Raises a `UserError` for unknown fields, values of a wrong type, missing ones without a default,
    and the config of another command. `place`, such as a file, is where the values come from.
    """
    if not isinstance(values, dict):
        raise UserError(f"{place} is {values!r}, but it must be a JSON object with its options.")
    values = dict(values)
    expected = getattr(cls, COMMAND, None)
    command = expected
    if expected is not None:
        command = values.pop(COMMAND, expected)
    if command != expected:
        raise UserError(
            f"{place} is the config of a dotmoe {command}, not of a dotmoe {expected}. "
            "Use it with the command that wrote it, or choose another folder."
        )
    kinds = {name: kind for name, kind, _ in marked_fields(cls)}
    for name, value in values.items():
        if name not in kinds:
            hint = nearest(name, kinds) or " Leave it out, or name another file."
            raise UserError(f"{name} in {place} is no option.{hint}")
        values[name] = _value_of(kinds[name], value, name, place)
    for name, default in defaults_of(cls, None).items():
        if default is REQUIRED and name not in values:
            raise UserError(f"{place} lacks {name}, which has no default. Add it.")
    return cls(**values)


def marked_fields(cls: Any) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Yield name, type and marks of each dataclass field, with marks on parts of the type."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in fields(cls):
        hint, marks = hints[field.name], ()
        if typing.get_origin(hint) is Annotated:
            hint, marks = hint.__origin__, hint.__metadata__
        for part in typing.get_args(hint):
            marks += getattr(part, "__metadata__", ())
        yield field.name, hint, marks


def _value_of(kind: Any, value: Any, name: str, place: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return from_values(typing.cast(type[Any], kind), value, f"{name} of {place}")
    plain = tuple(value) if isinstance(value, list) else value
    if not _fits(plain, kind):
        shown = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
        raise UserError(f"{name} in {place} is {value!r}, which is not {shown}.")
    return plain


def _fits(value: Any, kind: Any) -> bool:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _fits(value, parts[0])
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is typing.Literal:
        return value in parts
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, parts[0]) for item in value)
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
    return isinstance(value, kind)
