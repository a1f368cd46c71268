"""One thing changed and all else equal: conversions of one model as a table, a grid, or curves."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from dotmoe.analyse.history import metric_columns
from dotmoe.baselines import MethodName
from dotmoe.calibrate import Start
from dotmoe.checkpoint.folder import fingerprint
from dotmoe.compare import Point, dense_row, moe_row, plain_run, write_summary
from dotmoe.config import FinetuneRunConfig, RunConfig
from dotmoe.errors import UserError
from dotmoe.evaluate import TextConfig, active_experts_curve
from dotmoe.files import read_json, write_json
from dotmoe.granularity import resolve
from dotmoe.load import dense_config
from dotmoe.models.family import widths_of
from dotmoe.pipeline import convert, finetune
from dotmoe.progress import Progress
from dotmoe.provenance import provenance
from dotmoe.recipes import finetune_recipe
from dotmoe.run_folder import STAGES
from dotmoe.tables import Table, millions, percent

Axis = Literal["experts", "active", "start", "methods"]

_FIRST = {"experts": "E", "active": "aligned at", "start": "start", "methods": "method"}
_CURVED = ("loss", "kl", "ce")
"""Metrics that are kept step by step."""


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


def sweep(config: SweepConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Make every run that is not finished yet; write `sweep.json` and `sweep.md` into `out`.

    Runs have the same model, text, seed and budget. Each is a run folder of its own, so that a
    sweep that was stopped goes on where it was, and one with more values makes only those.

    Args:
        config: What is swept, and the config of all runs.
        progress: Shows the progress.

    Returns:
        Contents of `sweep.json`: `axis`, `rows` (one a model that was measured, the dense one
        first), `curves` (training metrics by run, step by step), and for `over_active` `grid`:
        `trained_at` and `measured_at` (shares), `active_experts_AB`, `perplexity_AB` and
        `loss_above_dense_AB`, a row for each trained share.

    Raises:
        UserError: As `points_of`, before anything is run, and as `convert` and `finetune`; runs
            that were finished before are kept.
    """
    progress = progress or Progress(quiet=True)
    axis = axis_of(config)
    width = widths_of(dense_config(config.model)[0]).ffn
    points = points_of(config, width)
    rows: list[dict[str, Any]] = []
    curves: dict[str, Any] = {}
    for point in points:
        progress.log(f"{point.name}:")
        results = convert(point.config, progress).results
        if not rows:
            rows.append(dense_row(results))
        rows.append(_row(point, results))
        _keep_curve(curves, point.name, Path(point.config.out) / STAGES["align"])
        for training in point.finetunes:
            name = Path(training.out).name
            progress.log(f"{name}:")
            found = finetune(training, progress).results
            trained = {"recovery_steps": found["steps"], "recovery_tokens": found["tokens"]}
            rows.append(_row(point, found) | {"steps": results["steps"]} | trained)
            _keep_curve(curves, name, Path(training.out) / STAGES["finetune"])
    summary = {
        "origin": "measured",
        "axis": axis,
        "model": config.model,
        "rows": rows,
        "curves": curves,
        "text": results["dense"]["text"],
        "window": results["dense"]["window"],
        "protocol": results["dense"]["protocol"],
        "provenance": provenance(config.seed),
    }
    if axis == "active":
        summary["grid"] = _grid(config, points, width, progress)
    write_summary(config.out, "sweep", summary, tables(summary))
    return summary


def tables(summary: dict[str, Any]) -> list[Table]:
    """All models of a sweep, and where there is a grid, perplexity by trained and measured k."""
    columns = [_FIRST[summary["axis"]], "k of E", "active", "active parameters", "perplexity"]
    columns += ["nats above dense", "steps", "align, s"]
    rows = [_cells(row) for row in summary["rows"]]
    if any("recovery_tokens" in row for row in summary["rows"]):
        columns.append("finetuned on, tokens")
        for cells, row in zip(rows, summary["rows"], strict=True):
            tokens = row.get("recovery_tokens")
            cells.append(None if tokens is None else f"{tokens:,}")
    # All columns may wrap: there are too many of them for a narrow terminal.
    found = [Table(columns=columns, rows=rows, words=len(columns))]
    if "grid" in summary:
        grid = summary["grid"]
        shown = zip(grid["measured_at"], grid["active_experts"], strict=True)
        trained = zip(grid["trained_at"], grid["perplexity_AB"], strict=True)
        found.append(
            Table(
                title="Perplexity by k while aligned and k in the export",
                columns=["aligned at", *(f"{percent(share)} (k = {k})" for share, k in shown)],
                rows=[[percent(s), *(f"{value:.2f}" for value in row)] for s, row in trained],
                note=f"dense {grid['dense_perplexity']:.2f}",
            )
        )
    return found


def axis_of(config: SweepConfig) -> Axis:
    """What is swept.

    Raises:
        UserError: Nothing, or more than one thing; a value named twice; options that mean nothing
            for what is swept.
    """
    given = _values(config)
    chosen = [axis for axis, values in given.items() if values]
    if len(chosen) != 1:
        options = ", ".join(f"--over-{axis}" for axis in given)
        raise UserError(
            f"{len(chosen)} things are to be swept, but it must be 1. Give one of {options}."
        )
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
    plain = plain_run(config)
    if axis in ("experts", "active") and config.experts.active_experts is not None:
        raise UserError(
            f"active_experts is {config.experts.active_experts} for all, but k must change with "
            f"over_{axis}. Give --active, a share, or leave it out."
        )
    points = []
    for value in _values(config)[axis]:
        changed: dict[str, Any]
        if axis == "experts":
            changed = {"experts": replace(plain.experts, experts=value, expert_size=None)}
        elif axis == "active":
            changed = {"experts": replace(plain.experts, active=value)}
        elif axis == "start":
            changed = {"calibrate": replace(plain.calibrate, start=value)}
        else:
            changed = {"method": value}
        name = f"{axis.removesuffix('s') if axis == 'methods' else axis}-"
        name += f"{value:g}" if isinstance(value, float) else str(value)
        run = replace(plain, out=str(Path(plain.out) / name), **changed)
        resolve(run.experts, ffn_width)
        finetunes = _finetunes(config, run) if axis == "methods" else ()
        points.append(Point(name=name, value=value, config=run, finetunes=finetunes))
    for share in config.measured_at:
        resolve(replace(config.experts, active=share), ffn_width)
    return points


def _values(config: SweepConfig) -> dict[Axis, tuple[Any, ...]]:
    return {
        "experts": config.over_experts,
        "active": config.over_active,
        "start": config.over_start,
        "methods": config.over_methods,
    }


def _finetunes(config: SweepConfig, run: RunConfig) -> tuple[FinetuneRunConfig, ...]:
    recipe = finetune_recipe(config.recovery)
    return tuple(
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


def _row(point: Point, results: dict[str, Any]) -> dict[str, Any]:
    """What a run measured, with the seconds of its alignment steps; None where it had none."""
    file = Path(point.config.out) / STAGES["align"] / "metrics.jsonl"
    seconds = sum(metric_columns(file)["seconds"]) if file.is_file() else None
    return moe_row(point, results) | {"align_seconds": seconds}


def _cells(row: dict[str, Any]) -> list[str | None]:
    seconds = row.get("align_seconds")
    return [
        percent(row["value"]) if isinstance(row["value"], float) else str(row["value"]),
        f"{row['active_experts']} of {row['num_experts']}" if "num_experts" in row else None,
        percent(row["active_fraction"]),
        millions(row["parameters"]),
        f"{row['perplexity']:.2f}",
        f"{row['loss_above_dense']:.3f}",
        str(row["steps"]) if "steps" in row else None,
        None if seconds is None else f"{seconds:.0f}",
    ]


def _keep_curve(curves: dict[str, Any], name: str, stage: Path) -> None:
    """Put the metrics of a training stage into `curves`, if there was any."""
    file = stage / "metrics.jsonl"
    if file.is_file():
        columns = metric_columns(file)
        kept = {metric: columns[metric] for metric in _CURVED if metric in columns}
        curves[name] = {"steps": columns["steps"], **kept}


def _grid(
    config: SweepConfig, points: list[Point], ffn_width: int, progress: Progress
) -> dict[str, Any]:
    """Every model at every share of active experts, with k changed in the export alone."""
    shares = config.measured_at or config.over_active
    active = [
        resolve(replace(config.experts, active=share), ffn_width).active_experts for share in shares
    ]
    rows = [_measured(config, point, active, progress) for point in points]
    return {
        "trained_at": [point.value for point in points],
        "measured_at": list(shares),
        "active_experts": active,
        "dense_perplexity": rows[0]["all_experts"]["perplexity"],
        "perplexity_AB": [_by_k(row, active, "perplexity") for row in rows],
        "loss_above_dense_AB": [_by_k(row, active, "loss_above_all_experts") for row in rows],
        "protocol": rows[0]["protocol"],
    }


def _by_k(curve: dict[str, Any], active: list[int], figure: str) -> list[float]:
    by_k = {point["active_experts"]: point[figure] for point in curve["points"]}
    return [by_k[k] for k in active]


def _measured(
    config: SweepConfig, point: Point, active: list[int], progress: Progress
) -> dict[str, Any]:
    """Curve over k of one run's export: from disk where the same was measured before."""
    export = Path(point.config.out) / STAGES["export"]
    file = Path(config.out) / f"{point.name}-curve.json"
    text = TextConfig(text=config.eval_text, max_tokens=config.eval_tokens)
    inputs = {
        "export": fingerprint(export),
        "active_experts": active,
        "text": list(text.text),
        "max_tokens": text.max_tokens,
    }
    known = read_json(file) if file.is_file() else {}
    if known.get("inputs") == inputs:
        return known
    with progress.bar(f"{point.name} at other k") as update:
        curve = active_experts_curve(export, text, tuple(active), config.load, update)
    write_json(file, curve | {"inputs": inputs})
    return curve
