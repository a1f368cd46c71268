"""One thing changed and all else equal: conversions of one model as a table, a grid, or curves."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from dotmoe.analyse.history import metric_columns
from dotmoe.baselines import MethodName
from dotmoe.calibrate import Start
from dotmoe.checkpoint.folder import fingerprint
from dotmoe.compare import Point, moe_row, plain_run, summary_of, write_summary
from dotmoe.config import FinetuneRunConfig, RunConfig
from dotmoe.errors import UserError
from dotmoe.evaluate import TextConfig, active_experts_curve
from dotmoe.files import read_json, write_json
from dotmoe.granularity import resolve
from dotmoe.load import dense_config
from dotmoe.models.family import widths_of
from dotmoe.options import above, at_least, at_most
from dotmoe.pipeline import finetune
from dotmoe.progress import Progress
from dotmoe.recipes import finetune_recipe
from dotmoe.run_folder import STAGES
from dotmoe.tables import Table, millions, percent, table_of

Share = Annotated[float, above(0), at_most(1)]
_CHANGED: dict[str, Callable[[RunConfig, Any], dict[str, Any]]] = {
    "experts": lambda run, E: {"experts": replace(run.experts, experts=E, expert_size=None)},
    "active": lambda run, share: {"experts": replace(run.experts, active=share)},
    "start": lambda run, start: {"calibrate": replace(run.calibrate, start=start)},
    "methods": lambda run, method: {"method": method},
}
"""What can be swept, and what a value of it changes in a run."""
_HEADINGS = {"experts": "E", "active": "aligned at", "start": "start", "methods": "method"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepConfig(RunConfig):
    """One model, converted once for each value of what is swept: give one of the four `--over`."""

    command: ClassVar[str] = "sweep"

    over_experts: tuple[Annotated[int, at_least(2)], ...] = ()
    """Granularity: numbers of experts a layer (E). The active share stays, so that k grows with
    E."""
    over_active: tuple[Share, ...] = ()
    """Shares of the experts that run while aligning. Each model is then measured at all shares of
    `measured_at`, with k changed in the export alone."""
    measured_at: tuple[Share, ...] = ()
    """Shares of the experts at which `over_active` measures. Default: those of `over_active`."""
    over_start: tuple[Start, ...] = ()
    """Starts of the alignment: what they are worth, step by step."""
    over_methods: tuple[MethodName, ...] = ()
    """Methods whose conversions are finetuned alike (fig:effect_of_init)."""
    finetune: str = "sft"
    """Recipe of `dotmoe finetune` for `over_methods`."""
    finetune_steps: tuple[Annotated[int, at_least(1)], ...] = ()
    """Lengths of that finetuning, each a training of its own with its own schedule. Default: the
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
    curves: dict[str, Any] = {}

    def rows_of(point: Point, results: dict[str, Any]) -> Iterator[dict[str, Any]]:
        columns = _metrics(Path(point.config.out) / STAGES["align"])
        seconds = {"align_seconds": sum(columns["seconds"]) if columns else None}
        curves[point.name] = _curve(columns)
        yield moe_row(point, results) | seconds
        for training in _finetunes(config, point.config) if axis == "methods" else ():
            name = Path(training.out).name
            progress.log(f"{name}:")
            found = finetune(training, progress).results
            curves[name] = _curve(_metrics(Path(training.out) / STAGES["finetune"]))
            trained = {"finetune_steps": found["steps"], "finetune_tokens": found["tokens"]}
            yield moe_row(point, found) | seconds | {"steps": results["steps"]} | trained

    summary = summary_of(config, points, rows_of, progress)
    summary["axis"] = axis
    summary["curves"] = {name: curve for name, curve in curves.items() if curve}
    if axis == "active":
        summary["grid"] = _grid(config, points, width, progress)
    write_summary(config.out, "sweep", summary, tables(summary))
    return summary


def tables(summary: dict[str, Any]) -> list[Table]:
    """All models of a sweep, and where there is a grid, perplexity by trained and measured k."""
    columns: dict[str, Callable[[Any], str | None]] = {
        _HEADINGS[summary["axis"]]: lambda row: _named(row["value"]),
        "k of E": _k_of_experts,
        "active": lambda row: percent(row["active_fraction"]),
        "active parameters": lambda row: millions(row["parameters"]),
        "perplexity": lambda row: f"{row['perplexity']:.2f}",
        "nats above dense": lambda row: f"{row['loss_above_dense']:.3f}",
        "steps": lambda row: str(row["steps"]) if "steps" in row else None,
        "align, s": lambda row: f"{row['align_seconds']:.0f}" if row.get("align_seconds") else None,
    }
    if summary["axis"] == "methods":
        columns["finetuned on, tokens"] = lambda row: (
            f"{row['finetune_tokens']:,}" if "finetune_tokens" in row else None
        )
    found = [table_of(summary["rows"], columns)]
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


def axis_of(config: SweepConfig) -> str:
    """What is swept, a key of `_CHANGED`.

    Raises:
        UserError: Nothing, or more than one thing; a value named twice; options that mean nothing
            for what is swept.
    """
    chosen = [axis for axis in _CHANGED if _values(config, axis)]
    if len(chosen) != 1:
        options = ", ".join(f"--over-{axis}" for axis in _CHANGED)
        raise UserError(
            f"{len(chosen)} things are to be swept, but it must be 1. Give one of {options}."
        )
    (axis,) = chosen
    if len(set(_values(config, axis))) < len(_values(config, axis)):
        raise UserError(f"over_{axis} names a value twice. Name each once.")
    for option, its_axis in (("measured_at", "active"), ("finetune_steps", "methods")):
        if getattr(config, option) and axis != its_axis:
            raise UserError(f"{option} is for --over-{its_axis} alone. Leave it out.")
    return axis


def points_of(config: SweepConfig, ffn_width: int) -> list[Point]:
    """The conversions of a sweep, in the order of its table.

    Args:
        config: What is swept.
        ffn_width: Neurons of one FFN of the model (N), which all splits must fit.

    Raises:
        UserError: As `axis_of`; a split that does not fit; no text to measure on that all runs
            share, no such recipe, or a k that is fixed where a share is swept.
    """
    axis = axis_of(config)
    plain = plain_run(config)
    if axis in ("experts", "active") and config.experts.active_experts is not None:
        raise UserError(
            f"active_experts is {config.experts.active_experts} for all, but k must change with "
            f"over_{axis}. Give --active, a share, or leave it out."
        )
    if axis == "methods":
        finetune_recipe(config.finetune)
    points = []
    for value in _values(config, axis):
        name = f"{'method' if axis == 'methods' else axis}-"
        name += f"{value:g}" if isinstance(value, float) else str(value)
        run = replace(plain, out=str(Path(plain.out) / name), **_CHANGED[axis](plain, value))
        resolve(run.experts, ffn_width)
        points.append(Point(name=name, value=value, config=run))
    for share in config.measured_at:
        resolve(replace(config.experts, active=share), ffn_width)
    return points


def _values(config: SweepConfig, axis: str) -> tuple[Any, ...]:
    values: tuple[Any, ...] = getattr(config, f"over_{axis}")
    return values


def _named(value: Any) -> str:
    return percent(value) if isinstance(value, float) else str(value)


def _k_of_experts(row: dict[str, Any]) -> str | None:
    return f"{row['active_experts']} of {row['num_experts']}" if "num_experts" in row else None


def _finetunes(config: SweepConfig, run: RunConfig) -> Iterator[FinetuneRunConfig]:
    """What is done with a conversion afterwards, the shortest first."""
    recipe = finetune_recipe(config.finetune)
    for steps in sorted(config.finetune_steps or (recipe.finetune.steps,)):
        yield replace(
            recipe,
            run=run.out,
            out=f"{run.out}-finetuned-{steps}",
            finetune=replace(recipe.finetune, steps=steps),
            load=config.load,
            seed=config.seed,
        )


def _metrics(stage: Path) -> dict[str, list[Any]]:
    """Metrics of a training stage, step by step; {} if there was none."""
    file = stage / "metrics.jsonl"
    return metric_columns(file) if file.is_file() else {}


def _curve(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: columns[name] for name in ("steps", "loss", "kl", "ce") if name in columns}


def _grid(
    config: SweepConfig, points: list[Point], ffn_width: int, progress: Progress
) -> dict[str, Any]:
    """Every model at every share of active experts, with k changed in the export alone."""
    shares = config.measured_at or config.over_active
    active = [
        resolve(replace(config.experts, active=share), ffn_width).active_experts for share in shares
    ]
    curves = [_measured(config, point, active, progress) for point in points]

    def by_k(figure: str) -> list[list[float]]:
        found = [{at["active_experts"]: at[figure] for at in curve["points"]} for curve in curves]
        return [[row[k] for k in active] for row in found]

    return {
        "trained_at": [point.value for point in points],
        "measured_at": list(shares),
        "active_experts": active,
        "dense_perplexity": curves[0]["all_experts"]["perplexity"],
        "perplexity_AB": by_k("perplexity"),
        "loss_above_dense_AB": by_k("loss_above_all_experts"),
        "protocol": curves[0]["protocol"],
    }


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
