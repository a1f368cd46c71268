"""Plots of the experts: how often each runs, which layers route alike, what experts write."""

import math
import statistics
from typing import Any

from dotmoe.report.plots.style import COLOURS, INK, MARKERS, PAPER, QUIET, new_figure

MAP = "cividis"
"""From dark blue to yellow; reads the same with any kind of colour vision."""

_MOST_SHAPES = len(COLOURS)
_MOST_WRITTEN = 8
"""Layers of a map whose figures are written into it."""
_LEAST_SCALE = 0.05
"""So that noise around nothing does not look like something."""
LIGHT, DARK = "#ffffff", "#000000"


def utilisation_plot(values: dict[str, Any]) -> Any:
    """Share of the tokens that run each expert, layer by layer, the busiest expert first.

    Experts of different layers have nothing to do with each other, so their order is free.
    """
    shares = [sorted((100 * s for s in layer), reverse=True) for layer in values["share_LE"]]
    figure = new_figure(max(2.2, min(4.5, 1.2 + 0.16 * len(shares))))
    axes = figure.add_subplot()
    image = axes.imshow(shares, cmap=MAP, vmin=0, aspect="auto", interpolation="none")
    _layers(axes.yaxis, values["layers"])
    axes.grid(visible=False)
    axes.set_xlabel("expert of its layer, busiest first (rank)")
    axes.set_ylabel("layer")
    _scale(figure, image, axes, "tokens that run it, %")
    return figure


def overlap_plot(values: dict[str, Any]) -> Any:
    """How alike the layers route, each with each other; the diagonal, which is 1, is left blank."""
    size = len(values["layers"])
    similarity = [
        [math.nan if a == b else values["similarity_LL"][a][b] for b in range(size)]
        for a in range(size)
    ]
    others = [value for row in similarity for value in row if not math.isnan(value)]
    most = max([_LEAST_SCALE, *others])
    figure = new_figure(3.8)
    axes = figure.add_subplot()
    image = axes.imshow(similarity, cmap=MAP, vmin=0, vmax=most, interpolation="none")
    if size <= _MOST_WRITTEN:
        for a, row in enumerate(similarity):
            for b, value in enumerate(row):
                colour = LIGHT if value < most / 2 else DARK
                if a != b:
                    axes.annotate(f"{value:.2f}", (b, a), ha="center", va="center", color=colour)
    _layers(axes.yaxis, values["layers"])
    _layers(axes.xaxis, values["layers"])
    axes.grid(visible=False)
    axes.set_xlabel("layer")
    axes.set_ylabel("layer")
    _scale(figure, image, axes, "routing shared above chance (1: all)")
    return figure


def scatter_plot(values: dict[str, Any]) -> Any:
    """Expert outputs in two dimensions; few experts by colour and shape, many by number too."""
    figure = new_figure(4.4)
    axes = figure.add_subplot()
    points, experts = values["points"], values["expert"]
    found = sorted(set(experts))
    if len(found) <= _MOST_SHAPES:
        for index, expert in enumerate(found):
            own = [p for p, e in zip(points, experts, strict=True) if e == expert]
            axes.scatter(
                *_columns(own),
                s=10,
                color=COLOURS[index],
                marker=MARKERS[index],
                label=f"expert {expert}",
                rasterized=True,
            )
        axes.legend(loc="best")
    else:
        image = axes.scatter(
            *_columns(points), s=8, c=experts, cmap=MAP, linewidths=0, rasterized=True
        )
        _scale(figure, image, axes, "expert (number)")
        for expert in found:
            own = [p for p, e in zip(points, experts, strict=True) if e == expert]
            middle = [statistics.median(column) for column in _columns(own)]
            axes.annotate(
                str(expert),
                middle,
                ha="center",
                va="center",
                fontsize=9,
                color=INK,
                bbox={"facecolor": PAPER, "edgecolor": "none", "alpha": 0.8, "pad": 1},
            )
    axes.axhline(0, color=QUIET, linewidth=0.4)
    axes.axvline(0, color=QUIET, linewidth=0.4)
    axes.set_xlabel("t-SNE dimension 1 (no unit)")
    axes.set_ylabel("t-SNE dimension 2 (no unit)")
    return figure


def _columns(points: list[list[float]]) -> tuple[list[float], list[float]]:
    return [point[0] for point in points], [point[1] for point in points]


def _layers(axis: Any, layers: list[int]) -> None:
    """Numbers of the layers, as many as fit."""
    step = -(-len(layers) // 12)
    axis.set_ticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])


def _scale(figure: Any, image: Any, axes: Any, label: str) -> None:
    bar = figure.colorbar(image, ax=axes, label=label)
    bar.solids.set_rasterized(True)
    bar.outline.set_visible(False)
