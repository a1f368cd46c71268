"""SweepConfig: one model converted several times, with one thing changed; and the runs of it."""

import dataclasses
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from dotmoe.baselines import MethodName
from dotmoe.calibrate import Start
from dotmoe.config import FinetuneRunConfig, RunConfig
from dotmoe.errors import UserError
from dotmoe.granularity import resolve
from dotmoe.recipes import finetune_recipe

Axis = Literal["experts", "active", "start", "methods"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepConfig(RunConfig):
    """One model, converted once for each value of what is swept: give one of the four `--over`."""

    command: ClassVar[str] = "sweep"

    over_experts: tuple[int, ...] = ()
    """Granularity: numbers of experts a layer (E). The active share stays, so that k grows with
    E."""
    over_active: tuple[float, ...] = ()
    """Shares of the experts that run while aligning. Each model is then measured at all shares of
    `measured_at`, with k changed in the export alone."""
    measured_at: tuple[float, ...] = ()
    """Shares of the experts at which `over_active` measures. Default: those of `over_active`."""
    over_start: tuple[Start, ...] = ()
    """Starts of the alignment: what they are worth, step by step."""
    over_methods: tuple[MethodName, ...] = ()
    """Methods whose conversions are finetuned alike (fig:effect_of_init)."""
    recovery: str = "sft"
    """Recipe of `dotmoe finetune` for `over_methods`."""
    recovery_steps: tuple[int, ...] = ()
    """Lengths of that recovery, each a training of its own with its own schedule. Default: the
    recipe's alone."""
    method: Annotated[Literal["dot_moe"], tyro.conf.Suppress] = "dot_moe"


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One conversion of a sweep."""

    name: str
    """Subfolder of the sweep."""
    value: int | float | str
    """Of what is swept."""
    config: RunConfig
    recoveries: tuple[FinetuneRunConfig, ...] = ()
    """What is done with the conversion afterwards, the shortest first."""


def axis_of(config: SweepConfig) -> Axis:
    """What is swept.

    Raises:
        UserError: Nothing, or more than one thing; a value named twice; options that mean nothing
            for what is swept.
    """
    given: dict[Axis, tuple[int | float | str, ...]] = {
        "experts": config.over_experts,
        "active": config.over_active,
        "start": config.over_start,
        "methods": config.over_methods,
    }
    chosen = [axis for axis, values in given.items() if values]
    if len(chosen) != 1:
        options = ", ".join(f"--over-{axis}" for axis in given)
        raise UserError(f"{len(chosen)} things are to be swept, but it must be 1. Give one of "
                        f"{options}.")  # fmt: skip
    (axis,) = chosen
    if len(set(given[axis])) < len(given[axis]):
        raise UserError(f"over_{axis} names a value twice. Name each once.")
    if config.measured_at and axis != "active":
        raise UserError("measured_at is for --over-active alone. Leave it out.")
    if config.recovery_steps and axis != "methods":
        raise UserError("recovery_steps is for --over-methods alone. Leave it out.")
    return axis


def points_of(config: SweepConfig, ffn_width: int) -> list[Point]:
    """The conversions of a sweep, in the order of its table.

    Args:
        config: What is swept.
        ffn_width: Neurons of one FFN of the model (N), which all splits must fit.

    Raises:
        UserError: As `axis_of`; a split that does not fit; no text to measure on that all runs
            share, or a k that is fixed where a share is swept.
    """
    axis = axis_of(config)
    if not config.eval_text:
        raise UserError(
            "eval_text names no text. A sweep needs one that no run is trained on, the same for "
            "all: give --eval-text."
        )
    if axis in ("experts", "active") and config.experts.active_experts is not None:
        raise UserError(
            f"active_experts is {config.experts.active_experts} for all, but k must change with "
            f"over_{axis}. Give --active, a share, or leave it out."
        )
    points = _POINTS[axis](config)
    for point in points:
        resolve(point.config.experts, ffn_width)
    for share in config.measured_at:
        resolve(replace(config.experts, active=share), ffn_width)
    return points


def _plain(config: SweepConfig, name: str) -> RunConfig:
    """The config of one conversion, nothing changed yet."""
    names = [field.name for field in dataclasses.fields(RunConfig)]
    plain = RunConfig(**{name: getattr(config, name) for name in names})
    return replace(plain, out=str(Path(config.out) / name))


def _over_experts(config: SweepConfig) -> list[Point]:
    points = []
    for number in config.over_experts:
        name = f"experts-{number}"
        experts = replace(config.experts, experts=number, expert_size=None)
        run = replace(_plain(config, name), experts=experts)
        points.append(Point(name=name, value=number, config=run))
    return points


def _over_active(config: SweepConfig) -> list[Point]:
    points = []
    for share in config.over_active:
        name = f"active-{share:g}"
        run = replace(_plain(config, name), experts=replace(config.experts, active=share))
        points.append(Point(name=name, value=share, config=run))
    return points


def _over_start(config: SweepConfig) -> list[Point]:
    points = []
    for start in config.over_start:
        name = f"start-{start}"
        run = replace(_plain(config, name), calibrate=replace(config.calibrate, start=start))
        points.append(Point(name=name, value=start, config=run))
    return points


def _over_methods(config: SweepConfig) -> list[Point]:
    recipe = finetune_recipe(config.recovery)
    points = []
    for method in config.over_methods:
        name = f"method-{method}"
        run = replace(_plain(config, name), method=method)
        recoveries = tuple(
            replace(
                recipe,
                run=run.out,
                out=f"{run.out}-finetuned-{steps}",
                finetune=replace(recipe.finetune, steps=steps),
                load=config.load,
                seed=config.seed,
            )
            for steps in sorted(config.recovery_steps or (recipe.finetune.steps,))
        )
        points.append(Point(name=name, value=method, config=run, recoveries=recoveries))
    return points


_POINTS = {
    "experts": _over_experts,
    "active": _over_active,
    "start": _over_start,
    "methods": _over_methods,
}
