"""RunConfig: the stages' own configs together, and their JSON form."""

import dataclasses
import json
import types
import typing
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from dotmoe.align import AlignConfig
from dotmoe.calibrate import CalibrateConfig
from dotmoe.data import DataConfig
from dotmoe.errors import UserError
from dotmoe.export import ExportConfig
from dotmoe.granularity import ExpertsConfig
from dotmoe.load import LoadConfig
from dotmoe.moe.assignment import AssignmentConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One conversion, from a dense checkpoint to an exported and measured MoE."""

    model: Positional[str]
    """Local folder or hub name of the dense model; `embedded` is the one that comes along."""
    out: Positional[str]
    """Run folder to write; the checkpoint will be in its `5_export`."""
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    calibrate: CalibrateConfig = field(default_factory=CalibrateConfig)
    assignment: AssignmentConfig = field(default_factory=AssignmentConfig)
    align: AlignConfig = field(default_factory=AlignConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    eval_text: tuple[str, ...] = ()
    """Files to measure perplexity on. Default: blocks of the data kept out of training."""
    eval_tokens: int = 65536
    """Tokens of text to measure perplexity on, at most."""
    seed: int = 0
    """Of initial values and data order. Same seed, machine and thread count: same result."""


def as_json(config: RunConfig) -> str:
    """The whole config, defaults included, as JSON text."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json(path: Path) -> RunConfig:
    """Read a config written by `as_json`; fields that are missing take their defaults.

    Raises:
        UserError: The file is missing, not JSON, or holds an unknown field.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--config {path} cannot be read: {error.strerror}.") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path} is not JSON ({error}).") from error
    if not isinstance(values, dict):
        raise UserError(f"--config {path} must hold one JSON object, as config.json of a run does.")
    config: RunConfig = _build(RunConfig, values, str(path))
    return config


def _build(cls: Any, values: dict[str, Any], place: str) -> Any:
    """Make a config dataclass from plain JSON values, checking every name and type."""
    hints = typing.get_type_hints(cls)
    arguments = {}
    for name, value in values.items():
        if name not in hints:
            near = get_close_matches(name, hints, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise UserError(f"{name} in {place} is no option.{hint}")
        kind = hints[name]
        if dataclasses.is_dataclass(kind):
            arguments[name] = _build(kind, value, f"{name} of {place}")
        else:
            plain = tuple(value) if isinstance(value, list) else value
            _require_type(plain, kind, f"{name} in {place}")
            arguments[name] = plain
    try:
        return cls(**arguments)
    except TypeError as error:
        raise UserError(f"{place} lacks a field: {error}.") from error


def _require_type(value: Any, kind: Any, place: str) -> None:
    if not _fits(value, kind):
        shown = getattr(kind, "__name__", None) or str(kind)
        raise UserError(f"{place} is {value!r}, which is not {shown}.")


def _fits(value: Any, kind: Any) -> bool:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is typing.Literal:
        return value in parts
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, parts[0]) for item in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)
