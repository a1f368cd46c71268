"""Config dataclasses: the range of a number stands on its field; here it is checked.

Example::

    @dataclass(frozen=True, kw_only=True)
    class LoopConfig:
        steps: Annotated[int, at_least(0)] = 150
        lr: Annotated[float, above(0)] = 5e-4
        micro_batch_size: Annotated[int, at_least(1), HOW] = 4

A rule across fields goes into a method `check_together()` that raises `UserError`.
"""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from dotmoe.errors import UserError, nearest

COMMAND = "command"
"""Key of a config's values that names its command, for classes with a `command` of their own."""

Config = TypeVar("Config")


class _How:
    def __repr__(self) -> str:
        return "HOW"


HOW = _How()
"""Marks a field that says how a result is made and not what it is: it may change on resume."""


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers that a field may have; those of a tuple each."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    """Whether `low` itself is out of range."""
    or_infinite: bool = False
    """Whether infinity is in range."""

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.above and value == self.low)

    def __str__(self) -> str:
        if self.above:
            return f"above {self.low:g}"
        if self.high == math.inf:
            return f"at least {self.low:g}"
        return (
            f"at most {self.high:g}" if self.low == -math.inf else f"{self.low:g} to {self.high:g}"
        )


def above(low: float, *, or_infinite: bool = False) -> Range:
    """Numbers greater than `low`."""
    return Range(low=low, above=True, or_infinite=or_infinite)


def at_least(low: float) -> Range:
    """`low` and greater numbers."""
    return Range(low=low)


def at_most(high: float) -> Range:
    """`high` and smaller numbers."""
    return Range(high=high)


def between(low: float, high: float) -> Range:
    """`low`, `high` and the numbers between."""
    return Range(low=low, high=high)


def check(config: Any) -> None:
    """Refuse a config with a number out of its range, before anything is loaded.

    Nested configs are checked, too. None is in every range.

    Raises:
        UserError: A number out of its range or not finite, or values that do not go together.
    """
    for name, kind, marks in _fields(type(config)):
        value = getattr(config, name)
        if dataclasses.is_dataclass(kind):
            check(value)
            continue
        for number in value if isinstance(value, tuple | list) else (value,):
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            can_be_infinite = any(isinstance(m, Range) and m.or_infinite for m in marks)
            if not (math.isfinite(number) or (can_be_infinite and number == math.inf)):
                raise UserError(f"{name} is {number}, but it must be a finite number.")
            for allowed in marks:
                if isinstance(allowed, Range) and number not in allowed:
                    raise UserError(f"{name} is {number}, but it must be {allowed}.")
    if hasattr(config, "check_together"):
        config.check_together()


def values_of(config: Any) -> dict[str, Any]:
    """A config, defaults included, as plain JSON values; with its command, if it has one.

    Infinity, for which JSON has no number, is the text `inf`.
    """
    text = json.dumps(dataclasses.asdict(config))
    values: dict[str, Any] = json.loads(text, parse_constant=lambda name: str(float(name)))
    command = getattr(config, COMMAND, None)
    return values if command is None else {COMMAND: command, **values}


def identity(config: Any) -> dict[str, Any]:
    """`values_of` without fields marked `HOW`: equal for runs that have the same result."""
    return _without_how(type(config), values_of(config))


def from_values(cls: type[Config], values: Any, place: str) -> Config:
    """A config from plain JSON values; missing fields take their defaults.

    Args:
        cls: The dataclass.
        values: What `values_of` returned, or a part of it.
        place: What to call its origin in an error, such as a file.

    Raises:
        UserError: An unknown field, a value of another type, a missing field without a default, or
            the config of another command.
    """
    if not isinstance(values, dict):
        raise UserError(f"{place} is {values!r}, but it must be a JSON object with its options.")
    expected = getattr(cls, COMMAND, None)
    if expected is not None:
        values = dict(values)
        command = values.pop(COMMAND, expected)
        if command != expected:
            raise UserError(
                f"{place} is the config of a dotmoe {command}, not of a dotmoe {expected}. "
                "Give it to the command it is for."
            )
    kinds = {name: kind for name, kind, _ in _fields(cls)}
    arguments = {}
    for name, value in values.items():
        if name not in kinds:
            raise UserError(f"{name} in {place} is no option.{nearest(name, kinds)}")
        arguments[name] = _value_of(kinds[name], value, name, place)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        is_required = field.default is field.default_factory is dataclasses.MISSING
        if is_required and field.name not in arguments:
            raise UserError(f"{place} lacks {field.name}, which has no default. Add it.")
    return cls(**arguments)


def _fields(cls: Any) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Name, type and marks of the fields of a dataclass; marks of parts of a type count, too."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        yield field.name, *_plain(hints[field.name])


def _plain(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without `Annotated` around it, and the marks, those of its parts included."""
    marks: tuple[Any, ...] = ()
    while typing.get_origin(hint) is Annotated:
        hint, marks = hint.__origin__, (*marks, *hint.__metadata__)
    for part in typing.get_args(hint):
        if typing.get_origin(part) is Annotated:
            marks += part.__metadata__
    return hint, marks


def _without_how(cls: Any, values: dict[str, Any]) -> dict[str, Any]:
    kept = dict(values)
    for name, kind, marks in _fields(cls):
        if HOW in marks:
            del kept[name]
        elif dataclasses.is_dataclass(kind):
            kept[name] = _without_how(kind, kept[name])
    return kept


def _value_of(kind: Any, value: Any, name: str, place: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return from_values(typing.cast(type[Any], kind), value, f"{name} of {place}")
    plain = tuple(value) if isinstance(value, list) else value
    if plain in ("inf", "-inf", "nan") and kind is float:
        return float(plain)
    if not _fits(plain, kind):
        shown = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
        raise UserError(f"{name} in {place} is {value!r}, which is not {shown}.")
    kinds = {part for part in (kind, *typing.get_args(kind)) if isinstance(part, type)}
    if type(plain) is int and float in kinds and int not in kinds:  # JSON may write 1.0 as 1
        return float(plain)
    return plain


def _fits(value: Any, kind: Any) -> bool:
    kind, _ = _plain(kind)
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is typing.Literal:
        return value in parts
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, parts[0]) for item in value)
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
    return isinstance(value, kind)
