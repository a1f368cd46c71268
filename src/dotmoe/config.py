"""Configs of whole runs: the stages' own configs together, their JSON form, and their identity."""

import dataclasses
import json
import math
import types
import typing
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

import tyro
from tyro.conf import Positional

from dotmoe.align import AlignConfig
from dotmoe.baselines import BaselineConfig, MethodName
from dotmoe.calibrate import CalibrateConfig
from dotmoe.data import DataConfig
from dotmoe.errors import UserError
from dotmoe.export import ExportConfig
from dotmoe.granularity import ExpertsConfig
from dotmoe.load import LoadConfig
from dotmoe.moe.assignment import AssignmentConfig
from dotmoe.sealed_json import SEAL
from dotmoe.self_text import SampleConfig
from dotmoe.training.config import TrainingConfig

COMMAND = "command"
"""Key of a config's JSON that names the command it is for; where it is missing, convert."""


class AnyRunConfig(Protocol):
    """What every config of a run that lives in a run folder has; a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    command: ClassVar[str]
    """The `dotmoe` command that takes it."""
    only_how: ClassVar[tuple[str, ...]]
    """Fields, as dotted paths, that say how a run is made and not what: they may be others when it
    goes on. A field that is no leaf stands for all in it."""

    @property
    def out(self) -> str:
        """The run folder."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One conversion, from a dense checkpoint to an exported and measured MoE."""

    command: ClassVar[str] = "convert"
    only_how: ClassVar[tuple[str, ...]] = (
        "out",
        "load.device",
        "load.sharding",
        "training",
        "align.micro_batch_size",
        "align.activation_checkpointing",
    )

    model: Annotated[Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Local folder or hub name of the dense model; `embedded` is the one that comes along."""
    out: Annotated[Positional[str], tyro.conf.arg(metavar="OUT")]
    """Run folder to write; the checkpoint will be in its `5_export`."""
    method: MethodName = "dot_moe"
    """How neurons come to experts: `dot_moe` learns it; the others are published methods without
    training, on the same budget."""
    baseline: BaselineConfig = field(default_factory=BaselineConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    calibrate: CalibrateConfig = field(default_factory=CalibrateConfig)
    assignment: AssignmentConfig = field(default_factory=AssignmentConfig)
    align: AlignConfig = field(default_factory=AlignConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    eval_text: tuple[str, ...] = ()
    """Files to measure perplexity on. Default: blocks of the data kept out of training."""
    eval_tokens: int = 65536
    """Tokens of text to measure perplexity on, at most."""
    seed: int = 0
    """Of initial values and data order. Same seed, machine and thread count: same result."""


_AT_LEAST: dict[str, float] = {
    "data.seq_len": 2,
    "data.data_epochs": 1,
    "data.shuffle_buffer": 0,
    "data.data_seed": 0,
    "sample.sample_tokens": 2,
    "sample.sample_batch_size": 1,
    "calibrate.calibration_tokens": 1,
    "calibrate.cluster_iterations": 0,
    "calibrate.router_std": 0,
    "assignment.sinkhorn_sweeps": 1,
    "align.steps": 0,
    "align.batch_size": 1,
    "align.micro_batch_size": 1,
    "align.warmup_ratio": 0,
    "align.lr_affinity": 0,
    "align.lr_router": 0,
    "align.weight_decay": 0,
    "align.kl_weight": 0,
    "align.ce_weight": 0,
    "align.z_loss_weight": 0,
    "align.balance_weight": 0,
    "export.scale_tokens": 1,
    "export.verify_tokens": 1,
    "eval_tokens": 2,
    "seed": 0,
}
_ABOVE_ZERO = (
    "calibrate.affinity_std",
    "calibrate.ridge",
    "assignment.tau_start",
    "assignment.tau_end",
    "align.lr",
    "align.max_epochs",
    "align.max_grad_norm",
    "align.surrogate_temperature",
    "export.max_shard_gib",
    "sample.sample_temperature",
)


def check(config: RunConfig) -> None:
    """Refuse numbers that no run can use, before anything is loaded.

    Raises:
        UserError: A number out of its range, not finite, or two that leave nothing to learn from.
    """
    for name in (*_AT_LEAST, *_ABOVE_ZERO):
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part)
        if value is None:
            continue
        allowed = value >= _AT_LEAST[name] if name in _AT_LEAST else value > 0
        if not allowed or not math.isfinite(value):
            rule = f"at least {_AT_LEAST[name]}" if name in _AT_LEAST else "above 0"
            option = name.rpartition(".")[2]
            raise UserError(f"{option} is {value}, but it must be {rule}. Choose such a number.")
    config.training.check()
    config.baseline.check()
    if any(not math.isfinite(weight) or weight <= 0 for weight in config.data.data_weights):
        raise UserError("data_weights must all be above 0. Leave a source out to have none of it.")
    if config.align.warmup_ratio > 1:
        raise UserError(f"warmup_ratio is {config.align.warmup_ratio}, but it must be at most 1.")
    if config.align.kl_weight == config.align.ce_weight == 0:
        raise UserError(
            "kl_weight and ce_weight are both 0, which leaves nothing to learn from. Raise one."
        )


Config = TypeVar("Config", bound=AnyRunConfig)


def as_json(config: AnyRunConfig) -> str:
    """The whole config, defaults included, and its command, as JSON text."""
    return json.dumps(as_values(config), indent=2) + "\n"


def as_values(config: AnyRunConfig) -> dict[str, Any]:
    """What `as_json` writes, as plain values."""
    return {COMMAND: config.command, **dataclasses.asdict(config)}


def identity(config: AnyRunConfig) -> dict[str, Any]:
    """What the run is, as plain values: two runs with the same identity have the same result.

    Left out is what `only_how` of the config's class lists.
    """
    values = as_values(config)
    for path in config.only_how:
        *parents, name = path.split(".")
        place = values
        for parent in parents:
            place = place[parent]
        place.pop(name, None)
    return values


def from_json(path: Path, cls: type[Config]) -> Config:
    """Read a config written by `as_json`; fields that are missing take their defaults.

    Raises:
        UserError: The file is missing, not JSON, of another command, or holds an unknown field.
    """
    values = _object_in(path)
    values.pop(SEAL, None)  # of a run folder; a copy may have been edited since
    command = values.pop(COMMAND, RunConfig.command)
    if command != cls.command:
        raise UserError(
            f"{path} is the config of a dotmoe {command}, not of a dotmoe {cls.command}. "
            "Give it to the command it is for."
        )
    config: Config = _build(cls, values, str(path))
    return config


def command_in(path: Path) -> str:
    """Which command a config written by `as_json` is for.

    Raises:
        UserError: The file is missing or not JSON.
    """
    return str(_object_in(path).get(COMMAND, RunConfig.command))


def _object_in(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"config {path} cannot be read: {error.strerror}.") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"config {path} is not JSON ({error}).") from error
    if not isinstance(values, dict):
        raise UserError(f"config {path} must hold one JSON object, as config.json of a run does.")
    return values


def _build(cls: Any, values: Any, place: str) -> Any:
    """Make a config dataclass from plain JSON values, checking every name and type."""
    if not isinstance(values, dict):
        raise UserError(f"{place} is {values!r}, but it must be a JSON object with its options.")
    known = {option.name for option in dataclasses.fields(cls)}
    hints = {name: kind for name, kind in typing.get_type_hints(cls).items() if name in known}
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
            plain: Any = tuple(value) if isinstance(value, list) else value
            _require_type(plain, kind, f"{name} in {place}")
            arguments[name] = float(plain) if _is_whole_float(plain, kind) else plain
    for option in dataclasses.fields(cls):
        is_required = option.default is option.default_factory is dataclasses.MISSING
        if is_required and option.name not in arguments:
            raise UserError(f"{place} lacks {option.name}, which has no default. Add it.")
    return cls(**arguments)


def _require_type(value: Any, kind: Any, place: str) -> None:
    if not _fits(value, kind):
        shown = getattr(kind, "__name__", None) or str(kind)
        raise UserError(f"{place} is {value!r}, which is not {shown}.")


def _is_whole_float(value: Any, kind: Any) -> bool:
    """Whether JSON has written without a point what is meant as a float."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return is_integer and float in (kind, *typing.get_args(kind)) and not _fits_integer(value, kind)


def _fits_integer(value: int, kind: Any) -> bool:
    parts = [part for part in typing.get_args(kind) if part is not float]
    return any(_fits(value, part) for part in parts)


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
