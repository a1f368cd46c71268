"""Plots of results, drawn with matplotlib (an extra). The same results give the same file.

Plots are as wide as a phone screen, so that their text stays readable there. The colours (Okabe and
Ito's) suit colour-blind readers; lines also differ in dash, points in shape.
"""

import io
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any

from dotmoe.common.files import Values
from dotmoe.measure.report import RunResults

NO_PLOTS = (
    "matplotlib is not installed, so there are no plots: pip install -e '.[plots]' in the checkout."
)
WIDTH = 4.8
"""Width of every plot in inches."""
INK, GRID, QUIET = "#1f2328", "#d3d8de", "#808890"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")

_STYLE: dict[str, Any] = {
    "svg.hashsalt": "dotmoe",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    **dict.fromkeys(
        ("text.color", "xtick.color", "ytick.color", "axes.edgecolor", "axes.labelcolor"), INK
    ),
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


def is_installed() -> bool:
    """Whether plots can be drawn."""
    return find_spec("matplotlib") is not None


def _styled() -> AbstractContextManager[None]:
    """Within this context, plots have the style of the page."""
    from matplotlib import rc_context

    return rc_context(_STYLE)


def draw_all(run: RunResults) -> dict[str, Any]:
    """Every plot that the results of a run allow, by name."""
    with _styled():
        figures = {name: training_plot(steps) for name, steps in run.steps.items() if steps}
        with run.reading("6_evaluate/results.json"):
            figures["models"] = models_plot(run.models)
        for name, (file, draw) in PLOTS.items():
            if file in run.files:
                with run.reading(f"6_evaluate/{file}.json"):
                    figures[name] = draw(run.files[file])
    return figures


def as_svg(figure: Any) -> bytes:
    """The figure as an SVG file with text as outlines, so that it looks the same everywhere."""
    svg = io.BytesIO()
    with _styled():
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    return svg.getvalue()


def training_plot(steps: list[Values]) -> Any:
    """Losses by step."""
    losses = {"loss": "loss", "ce": "CE, next token", "kl": "KL to dense"}
    losses = {key: name for key, name in losses.items() if key in steps[0]}
    if len(losses) == 2:  # with one term, the loss equals that term
        losses.pop("loss", None)
    figure = _figure(3)
    axes = figure.subplots()
    for (key, name), colour, dash in zip(losses.items(), COLOURS, ("-", "--", "-."), strict=False):
        values = [float("nan") if step.get(key) is None else step[key] for step in steps]
        style = {"color": colour, "linestyle": dash, "linewidth": 1, "label": name}
        axes.plot([step["step"] for step in steps], values, **style)
    _log_axis(axes.yaxis)
    axes.set(xlabel="step", ylabel="nats a token (log)")
    return _with_legend(figure, axes)


def models_plot(models: dict[str, Values]) -> Any:
    """A bar for the perplexity of each model, the dense one grey."""
    figure = _figure(0.8 + 0.35 * len(models))
    axes, values = figure.subplots(), [model["perplexity"] for model in models.values()]
    bars = axes.barh([*models], values, color=[QUIET, *COLOURS[:1] * (len(values) - 1)])
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.15)
    axes.set(xlabel="perplexity")
    return figure


def curve_plot(curve: Values) -> Any:
    """Perplexity against the share of the parameters that work on a token, at several k."""
    figure = _figure(3.2)
    axes, points = figure.subplots(), curve["points"]
    shares = [100 * point["active_parameters"] / curve["dense_parameters"] for point in points]
    perplexities = [point["perplexity"] for point in points]
    axes.plot(shares, perplexities, marker="o", color=COLOURS[0], label="bold: the current k")
    everything = f"{curve['all_experts']['model']}: all experts run"
    axes.axhline(perplexities[-1], linestyle="--", color=QUIET, label=everything)
    for point, *place in zip(points, shares, perplexities, strict=True):
        is_now = point["active_experts"] == curve["active_experts"]
        style = {"xytext": (6, 6), "fontweight": "bold" if is_now else "normal"}
        axes.annotate(f"k = {point['active_experts']}", place, textcoords="offset points", **style)
    _log_axis(axes.yaxis)
    axes.set(xlabel="parameters that work on a token, % of dense")
    axes.set(ylabel=f"perplexity per {curve['unit']} (log)")
    axes.margins(x=0.2, y=0.15)
    return _with_legend(figure, axes)


def utilisation_plot(analysis: Values) -> Any:
    """Share of the tokens that run each expert, layer by layer, the busiest expert first."""
    values = analysis["values"]
    shares = [sorted((100 * s for s in layer), reverse=True) for layer in values["share_LE"]]
    figure = _figure(max(2.2, min(4.5, 1.2 + 0.16 * len(shares))))
    axes = _map(figure, shares, "tokens that run it, %", aspect="auto")
    _layers(axes.yaxis, values["layers"])
    axes.set(xlabel="expert rank in its layer, busiest first", ylabel="layer")
    return figure


def scatter_plot(analysis: Values) -> Any:
    """Expert outputs in two dimensions: four experts marked, the others in grey."""
    values, by_expert = analysis["values"], defaultdict[int, list[Any]](list)
    for point, expert in zip(values["points"], values["expert"], strict=True):
        by_expert[expert].append(point)
    order = sorted(by_expert, key=lambda expert: (-len(by_expert[expert]), expert))
    shown, others = order[: len(COLOURS)], order[len(COLOURS) :]
    figure = _figure(4.4)
    axes = figure.subplots()

    def scatter(experts: list[int], **style: Any) -> None:
        points = zip(*(point for expert in experts for point in by_expert[expert]), strict=True)
        axes.scatter(*points, linewidths=0, rasterized=True, **style)

    if others:
        scatter(others, s=6, color=QUIET, alpha=0.4, label=f"{len(others)} others")
    for expert, colour, marker in zip(shown, COLOURS, "os^D", strict=False):
        scatter([expert], s=14, color=colour, marker=marker, label=f"expert {expert}")
    axes.grid(visible=False)
    axes.set(xlabel="t-SNE dimension 1 (no unit)", ylabel="t-SNE dimension 2 (no unit)")
    return _with_legend(figure, axes)


PLOTS: dict[str, tuple[str, Callable[[Values], Any]]] = {
    "active_experts": ("curve", curve_plot),
    "expert_utilisation": ("analysis/expert_utilisation", utilisation_plot),
    "expert_outputs_tsne": ("analysis/expert_outputs_tsne", scatter_plot),
}
"""Plots by name: the file in `6_evaluate` that each shows, without `.json`, and its function."""


def _figure(height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def _with_legend(figure: Any, axes: Any, columns: int = 3) -> Any:
    """Add the legend above all axes, where it takes height but no width."""
    spacing = {"columnspacing": 1.2, "handlelength": 1.6, "handletextpad": 0.5}
    drawn = axes.get_legend_handles_labels()
    figure.legend(*drawn, loc="outside upper left", ncols=columns, **spacing)
    return figure


def _log_axis(axis: Any) -> None:
    """Make an axis logarithmic with plain numbers, even if it spans less than a decade."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.axes.set_yscale("log")
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _map(figure: Any, rows: Any, label: str, **options: Any) -> Any:
    """Draw each value as a coloured cell, with a colour bar; returns the axes."""
    axes = figure.subplots()
    image = axes.imshow(rows, cmap="cividis", vmin=0, interpolation="none", **options)
    bar = figure.colorbar(image, ax=axes, label=label)
    bar.solids.set_rasterized(True)
    bar.outline.set_visible(False)
    axes.grid(visible=False)
    return axes


def _layers(axis: Any, layers: list[Any]) -> None:
    """Label an axis with the numbers of the layers, as many as fit."""
    step = -(-len(layers) // 12)
    axis.set_ticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
