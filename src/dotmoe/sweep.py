"""One thing changed and all else equal: conversions of one model as a table, a grid, or curves."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from dotmoe.calibrate import Start
from dotmoe.checkpoint import fingerprint
from dotmoe.compare import COLUMNS, Point, Row, moe_row, plain_run, summary_of, write_summary
from dotmoe.config import RunConfig
from dotmoe.errors import UserError
from dotmoe.evaluate import evaluate
from dotmoe.evaluate.models import EvaluateConfig, TextConfig
from dotmoe.files import read_json, write_json
from dotmoe.granularity import resolve
from dotmoe.load import dense_config
from dotmoe.models.family import widths_of
from dotmoe.options import above, at_least, at_most
from dotmoe.progress import Progress
from dotmoe.run_folder import STAGES
from dotmoe.tables import Table, millions, percent, table_of

Share = Annotated[float, above(0), at_most(1)]
_HEADINGS = {"experts": "E", "active": "aligned at", "start": "start"}
"""What can be swept, and what a table calls it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepConfig(RunConfig):
    """One model, converted once for each value of what is swept: give one of the three `--over`."""

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


def sweep(config: SweepConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Make every run that is not finished yet; write `sweep.json` and `sweep.md` into `out`.

    Runs have the same model, text, seed and budget. Each is a run folder of its own, so that a
    sweep that was stopped goes on where it was, and one with more values makes only those.

    Returns the contents of `sweep.json`: `axis`, `rows` (the dense model's first), `curves`
    (training metrics by run, step by step), and for `over_active` `grid`: `trained_at` and
    `measured_at` (shares), `perplexity_AB` and `loss_above_dense_AB`, a row for each trained share.
    Raises a `UserError`: as `convert`; or, before anything is run, options that do not go together.
    """
    progress, axis = progress or Progress(quiet=True), _axis_of(config)
    values, plain = dict.fromkeys(getattr(config, f"over_{axis}")), plain_run(config)
    points = [_point(axis, value, plain) for value in values]
    width = widths_of(dense_config(config.model)[0]).ffn
    shares = config.measured_at or config.over_active
    active = [resolve(replace(config.experts, active=s), width).active_experts for s in shares]
    curves: dict[str, Any] = {}

    def rows_of(point: Point, results: dict[str, Any]) -> list[Row]:
        file, seconds = Path(point.config.out) / STAGES["align"] / "metrics.jsonl", None
        if file.is_file():
            steps = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            seconds = sum(step["seconds"] for step in steps)
            kept = (name for name in ("loss", "kl", "ce") if name in steps[0])
            curves[point.name] = {"steps": [step["step"] for step in steps]} | {
                name: [step[name] for step in steps] for name in kept
            }
        return [moe_row(point, results) | {"align_seconds": seconds}]

    summary = summary_of(config, points, rows_of, progress)
    summary |= {"axis": axis, "curves": curves}
    if axis == "active":
        points = [point for point in points if point.name not in summary["left_out"]]
        measured = [_measured(config, point, active, progress) for point in points]
        by_k = [{at["active_experts"]: at for at in curve["points"]} for curve in measured]
        at_AB = [[points_by_k[k] for k in active] for points_by_k in by_k]
        summary["grid"] = {
            "trained_at": [point.value for point in points],
            "measured_at": list(shares),
            "active_experts": active,
            "dense_perplexity": measured[0]["all_experts"]["perplexity"],
            "perplexity_AB": [[at["perplexity"] for at in row] for row in at_AB],
            "loss_above_dense_AB": [[at["loss_above_all_experts"] for at in row] for row in at_AB],
            "protocol": measured[0]["protocol"],
        }
    write_summary(config.out, "sweep", summary, tables(summary))
    return summary


def tables(summary: dict[str, Any]) -> list[Table]:
    """All models of a sweep, and where there is a grid, perplexity by trained and measured k."""
    columns = {
        _HEADINGS[summary["axis"]]: lambda row: (
            percent(row["value"]) if isinstance(row["value"], float) else str(row["value"])
        ),
        "k of E": lambda row: (
            f"{row['active_experts']} of {row['num_experts']}" if "num_experts" in row else None
        ),
        "active parameters": lambda row: millions(row["parameters"]),
        **COLUMNS,
        "steps": lambda row: str(row["steps"]) if "steps" in row else None,
        "align, s": lambda row: f"{row['align_seconds']:.0f}" if row.get("align_seconds") else None,
    }
    found = [table_of(summary["rows"], columns)]
    if grid := summary.get("grid"):
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


def _axis_of(config: SweepConfig) -> str:
    chosen = [axis for axis in _HEADINGS if getattr(config, f"over_{axis}")]
    if len(chosen) != 1:
        options = ", ".join(f"--over-{axis}" for axis in _HEADINGS)
        raise UserError(
            f"{len(chosen)} things are to be swept, but it must be 1. Give one of {options}."
        )
    if (targets := config.experts.targets) != "ffn":
        raise UserError(f"targets is {targets}, but a sweep is of FFNs. Use dotmoe compare.")
    (axis,) = chosen
    if config.measured_at and axis != "active":
        raise UserError("measured_at is for --over-active alone. Leave it out.")
    if axis in ("experts", "active") and config.experts.active_experts is not None:
        raise UserError(
            f"active_experts is {config.experts.active_experts} for all, but k must change with "
            f"over_{axis}. Give --active, a share, or leave it out."
        )
    return axis


def _point(axis: str, value: Any, plain: RunConfig) -> Point:
    """The conversion of one value of what is swept."""
    field, change = {
        "experts": ("experts", {"experts": value, "expert_size": None}),
        "active": ("experts", {"active": value}),
        "start": ("calibrate", {"start": value}),
    }[axis]
    changed = replace(getattr(plain, field), **change)
    name = f"{axis}-{value:g}" if isinstance(value, float) else f"{axis}-{value}"
    return Point(name, value, replace(plain, out=str(Path(plain.out) / name), **{field: changed}))


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
    progress.log(f"{point.name} at other k:")
    asked = EvaluateConfig(model=str(export), curve=tuple(active), corpus=text, load=config.load)
    curve = evaluate(asked, progress)
    write_json(file, curve | {"inputs": inputs})
    return curve
