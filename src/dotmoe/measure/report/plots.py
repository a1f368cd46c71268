"""The report's one picture: perplexity against the parameters that work on a token.

It is drawn with matplotlib (an extra), as wide as a phone screen, so that its text stays readable
there. The same results give the same file.
"""

import io
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from dotmoe.common.files import Values
from dotmoe.measure.report.results import active_parameters

NO_PLOT = (
    "matplotlib is not installed, so there is no plot of quality: pip install -e '.[plots]' in the "
    "checkout."
)
WIDTH = 4.8
"""Width of the picture in inches."""
_INK, _GRID, _BLUE, _GREY = "#1f2328", "#d3d8de", "#0072b2", "#808890"
_STYLE: dict[str, Any] = {
    "svg.hashsalt": "dotmoe",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    **dict.fromkeys(
        ("text.color", "xtick.color", "ytick.color", "axes.edgecolor", "axes.labelcolor"), _INK
    ),
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


def is_installed() -> bool:
    """Whether the picture can be drawn."""
    return find_spec("matplotlib") is not None


def quality_svg(models: Mapping[str, Values], counts: Values, curve: Values | None) -> bytes:
    """Perplexity of each model at the share of the dense parameters that work on a token, as SVG.

    The dense model is the first of `models`. `curve`, if measured, adds the export at other k.
    """
    from matplotlib import rc_context

    svg = io.BytesIO()
    with rc_context(_STYLE):
        figure = quality_figure(models, counts, curve)
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    return svg.getvalue()


def quality_figure(models: Mapping[str, Values], counts: Values, curve: Values | None) -> Any:
    """The figure of `quality_svg`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure = Figure(figsize=(WIDTH, 3.2 + 0.1 * len(models)), layout="constrained")
    axes = figure.subplots()
    if curve is not None:
        points = curve["points"]
        shares = [100 * each["active_parameters"] / curve["dense_parameters"] for each in points]
        perplexities = [each["perplexity"] for each in points]
        axes.plot(shares, perplexities, ".--", color=_GREY, label="at other k, on its own text")
        for each, x, y in zip(points, shares, perplexities, strict=True):
            text = f"k = {each['active_experts']}"
            axes.annotate(text, (x, y), xytext=(6, 6), textcoords="offset points")
    markers = "os^Dv<>"
    for index, (name, model) in enumerate(models.items()):
        share = 100.0
        if index:
            share = 100 * active_parameters(model, counts) / counts["dense"]
        colour = _BLUE if index else _GREY
        marker = markers[index % len(markers)]
        axes.plot(share, model["perplexity"], linestyle="", label=name, marker=marker, color=colour)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set(xlabel="parameters that work on a token, % of dense", ylabel="perplexity (log)")
    axes.margins(x=0.2, y=0.2)
    figure.legend(loc="outside upper left", ncols=2, handletextpad=0.5)
    return figure
