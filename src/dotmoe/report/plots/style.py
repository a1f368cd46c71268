"""How every plot looks, and how it is written: the same input gives the same file.

Plots are as wide as a phone, so that their text stays readable there, and use no colours that one
kind of colour blindness confuses (Okabe and Ito's); lines differ in dash, points in shape too.
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

WIDTH = 4.8
"""Inches, of every plot."""

INK = "#1f2328"
PAPER = "#fefefe"
GRID = "#d3d8de"
QUIET = "#808890"

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D")

_SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dotmoe",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.framealpha": 0.85,
    "legend.facecolor": PAPER,
    "legend.edgecolor": GRID,
    "legend.fontsize": 9,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
}

_IN_PAGE = {INK: "currentColor", PAPER: "var(--paper)", GRID: "var(--grid)"}
"""Colours that follow the scheme of the page, light or dark."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """A plot that is drawn."""

    svg: str
    """A file of its own."""
    png: bytes
    """The same in pixels; empty where it was not asked for."""

    def in_page(self, name: str, alt: str) -> str:
        """As an element of an HTML page: no prolog, names of its own, colours of the page.

        Args:
            name: Goes before every name in it, since plots of one page must not share names.
            alt: What it shows, for those who do not see it.
        """
        svg = self.svg[self.svg.index("<svg") :]
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
        svg = re.sub(r'( id="|"#|url\(#)', rf"\g<1>{name}-", svg)
        svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
        svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
        for colour, variable in _IN_PAGE.items():
            svg = svg.replace(colour, variable)
        return svg.replace("<svg", f'<svg role="img" aria-label="{_attribute(alt)}"', 1)


def is_installed() -> bool:
    """Whether plots can be drawn; matplotlib is an extra."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


@contextmanager
def styled() -> Iterator[None]:
    """Figures that are made and saved within look as the page wants them."""
    from matplotlib import rc_context

    with rc_context(_SETTINGS):
        yield


def new_figure(height: float = 3.0) -> Any:
    """An empty figure of the page's width and `height` inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def written(figure: Any, *, in_pixels: bool) -> Plot:
    """The figure as SVG and, if asked for, as PNG."""
    svg, png = io.BytesIO(), io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    if in_pixels:
        figure.savefig(png, format="png", dpi=200, metadata={"Software": None})
    return Plot(svg=svg.getvalue().decode(), png=png.getvalue())


def thinned(values: list[float], most: int) -> tuple[list[float], int]:
    """Means of neighbours, at most `most` of them, and how many values each is the mean of.

    Example:
        >>> thinned([1.0, 3.0, 5.0, 7.0, 9.0], 3)
        ([2.0, 6.0, 9.0], 2)
    """
    size = -(-len(values) // most) if values else 1
    groups = [values[start : start + size] for start in range(0, len(values), size)]
    return [sum(group) / len(group) for group in groups], size


def _attribute(text: str) -> str:
    for sign, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;")):
        text = text.replace(sign, entity)
    return text
