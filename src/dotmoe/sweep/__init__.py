"""One thing changed and all else equal: conversions of one model as a table, a grid, or curves."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from dotmoe.analyse.history import metric_columns
from dotmoe.checkpoint_folder import fingerprint
from dotmoe.evaluate import TextConfig, active_experts_curve
from dotmoe.granularity import Granularity, resolve
from dotmoe.load import dense_config
from dotmoe.models.family import widths_of
from dotmoe.pipeline import convert, finetune
from dotmoe.progress import Progress
from dotmoe.run_folder import STAGES, provenance, read_json, write_json, write_text
from dotmoe.sweep.config import Point, SweepConfig, axis_of, points_of
from dotmoe.sweep.tables import as_markdown, tables

__all__ = ["SweepConfig", "as_markdown", "sweep", "tables"]

CURVED = ("loss", "kl", "ce")
"""Metrics that are kept step by step."""

Row = dict[str, Any]


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
    rows: list[Row] = []
    curves: dict[str, Any] = {}
    for point in points:
        progress.log(f"{point.name}:")
        results = convert(point.config, progress).results
        if not rows:
            rows.append(_dense_row(results))
        rows.append(_row(point, results))
        _keep_curve(curves, point.name, Path(point.config.out) / STAGES["align"])
        for recovery in point.recoveries:
            progress.log(f"{Path(recovery.out).name}:")
            found = finetune(recovery, progress).results
            trained = {"recovery_steps": found["steps"], "recovery_tokens": found["tokens"]}
            rows.append(_row(point, found) | {"steps": results["steps"]} | trained)
            _keep_curve(curves, Path(recovery.out).name, Path(recovery.out) / STAGES["finetune"])
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
    write_json(Path(config.out) / "sweep.json", summary)
    write_text(Path(config.out) / "sweep.md", as_markdown(summary))
    return summary


def _dense_row(results: dict[str, Any]) -> Row:
    return {
        "run": "dense",
        "value": "dense",
        "active_fraction": 1.0,
        "parameters": results["parameters"]["dense"],
        **_figures(results["dense"], results["dense"]),
    }


def _row(point: Point, results: dict[str, Any]) -> Row:
    split = Granularity(**results["granularity"])
    return {
        "run": point.name,
        "value": point.value,
        "num_experts": split.num_experts,
        "expert_size": split.expert_size,
        "active_experts": split.active_experts,
        "shared_size": split.shared_size,
        "active_fraction": split.active_fraction,
        "parameters": results["parameters"]["active"],
        "steps": results["steps"],
        "align_seconds": _seconds(Path(point.config.out) / STAGES["align"]),
        **_figures(results["moe"], results["dense"]),
    }


def _figures(result: dict[str, Any], dense: dict[str, Any]) -> Row:
    return {
        "perplexity": result["perplexity"],
        "loss": result["loss"],
        "loss_above_dense": result["loss"] - dense["loss"],
        "tokens": result["tokens"],
    }


def _seconds(stage: Path) -> float | None:
    """Of all alignment steps; None where there were none."""
    file = stage / "metrics.jsonl"
    return sum(metric_columns(file)["seconds"]) if file.is_file() else None


def _keep_curve(curves: dict[str, Any], name: str, stage: Path) -> None:
    """Put the metrics of a training stage into `curves`, if there was any."""
    file = stage / "metrics.jsonl"
    if file.is_file():
        columns = metric_columns(file)
        kept = {metric: columns[metric] for metric in CURVED if metric in columns}
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
        "perplexity_AB": [_cells(row, active, "perplexity") for row in rows],
        "loss_above_dense_AB": [_cells(row, active, "loss_above_all_experts") for row in rows],
        "protocol": rows[0]["protocol"],
    }


def _cells(curve: dict[str, Any], active: list[int], figure: str) -> list[float]:
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
