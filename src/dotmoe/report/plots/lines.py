"""Plots of something against something: training against steps, perplexity against k."""

import math
from typing import Any

from dotmoe.report.plots.style import COLOURS, DASHES, INK, QUIET, new_figure, thinned

MOST_POINTS = 300
_SMOOTHED_OVER = 20

LOSSES = {
    "loss": "loss",
    "ce": "CE, next token",
    "kl": "KL to the dense model",
}
SHARES = {
    "moved_fraction": "neurons that changed expert",
    "soft_hard_gap": "gap between soft and hard plan",
}


def training_plot(steps: list[dict[str, Any]]) -> Any:
    """Losses against steps; below them tau, and shares, where a run has them."""
    has_tau = "tau" in steps[0]
    shares = {key: name for key, name in SHARES.items() if key in steps[0]}
    count = 1 + has_tau + bool(shares)
    figure = new_figure(2.5 + 1.35 * (count - 1))
    ratios = [2.2] + [1.0] * (count - 1)
    axes = figure.subplots(count, 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    losses = {key: name for key, name in LOSSES.items() if key in steps[0]}
    if len(losses) == 2 and "loss" in losses:  # a loss of one term is that term
        del losses["loss"]
    _lines(axes[0], steps, losses)
    axes[0].set_yscale("log")
    _log(axes[0].yaxis)
    axes[0].set_ylabel("nats a token (log)")
    if has_tau:
        axes[1].plot(*_points(steps, "tau"), color=INK)
        axes[1].set_ylabel("tau\n(affinity)")
        axes[1].set_ylim(bottom=0)
    if shares:
        _lines(axes[-1], steps, shares, factor=100)
        axes[-1].set_ylabel("neurons, %" if "soft_hard_gap" not in shares else "%")
        axes[-1].set_ylim(bottom=0)
    axes[-1].set_xlabel("step")
    return figure


def curve_plot(curve: dict[str, Any]) -> Any:
    """Perplexity against the share of the parameters that work on a token, at several k."""
    points = curve["points"]
    shares = [100 * point["active_parameters"] / curve["dense_parameters"] for point in points]
    perplexities = [point["perplexity"] for point in points]
    figure = new_figure(3.2)
    axes = figure.add_subplot()
    axes.plot(
        shares, perplexities, marker="o", color=COLOURS[0], label="MoE; bold: its k as it is now"
    )
    axes.axhline(
        curve["all_experts"]["perplexity"],
        linestyle="--",
        color=QUIET,
        label=f"{curve['all_experts']['model']}: all experts run",
    )
    for point, share in zip(points, shares, strict=True):
        is_now = point["active_experts"] == curve["active_experts"]
        axes.annotate(
            f"k = {point['active_experts']}",
            (share, point["perplexity"]),
            textcoords="offset points",
            xytext=(6, 6),
            fontweight="bold" if is_now else "normal",
        )
    axes.set_yscale("log")
    _log(axes.yaxis)
    axes.set_xlabel("parameters that work on a token, % of the dense model's")
    axes.set_ylabel(f"perplexity per {curve['unit']} (log)")
    axes.margins(x=0.15, y=0.12)
    axes.legend()
    return figure


def _lines(
    axes: Any, steps: list[dict[str, Any]], names: dict[str, str], factor: float = 1.0
) -> None:
    """Each line faint as it is, and strong as a mean of its last steps."""
    window = max(1, len(steps) // _SMOOTHED_OVER)
    for colour, dash, (key, name) in zip(COLOURS, DASHES, names.items(), strict=False):
        at, values = _points(steps, key, factor)
        axes.plot(at, values, color=colour, alpha=0.3, linewidth=0.8)
        smooth = _running_mean([factor * _number(step.get(key)) for step in steps], window)
        axes.plot(at, thinned(smooth, MOST_POINTS)[0], color=colour, linestyle=dash, label=name)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=3,
        frameon=False,
        borderaxespad=0.2,
        columnspacing=1.2,
        handlelength=1.6,
    )


def _points(
    steps: list[dict[str, Any]], key: str, factor: float = 1.0
) -> tuple[list[float], list[float]]:
    at, _ = thinned([float(step["step"]) for step in steps], MOST_POINTS)
    values, _ = thinned([factor * _number(step.get(key)) for step in steps], MOST_POINTS)
    return at, values


def _running_mean(values: list[float], window: int) -> list[float]:
    """Mean of each value and those before it; a step without a value counts for nothing."""
    means = []
    for index in range(len(values)):
        last = [v for v in values[max(0, index - window + 1) : index + 1] if not math.isnan(v)]
        means.append(sum(last) / len(last) if last else math.nan)
    return means


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _log(axis: Any) -> None:
    """Plain numbers on a logarithmic axis, also where it spans less than a decade."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())
