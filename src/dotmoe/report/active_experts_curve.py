"""A curve of perplexity against k: as a table for a terminal, and as a figure."""

from pathlib import Path
from typing import Any

from rich.table import Table

from dotmoe.errors import UserError
from dotmoe.report.words import millions, percent

FIGURE_TYPES = (".svg", ".png", ".pdf")


def curve_table(curve: dict[str, Any]) -> Table:
    """A row for each k of `dotmoe.curve.active_experts_curve`."""
    title = f"perplexity per token, windows of {curve['window']}, {curve['tokens']:,} tokens"
    caption = f"* as the model is now; all {curve['num_experts']} experts are the dense model"
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    columns = ("k", "FFN", "active parameters", "of all", "perplexity", "nats above dense")
    for column in columns:
        table.add_column(column, justify="right")
    for point in curve["points"]:
        is_now = point["active_experts"] == curve["active_experts"]
        table.add_row(
            f"{point['active_experts']}{' *' if is_now else ''}",
            percent(point["active_fraction"]),
            millions(point["active_parameters"]),
            percent(point["active_parameters"] / curve["dense_parameters"]),
            f"{point['perplexity']:.2f}",
            f"{point['loss_above_dense']:.3f}",
        )
    return table


def require_drawable(path: Path) -> None:
    """Refuse a figure that `draw_curve` could not write, before anything is measured.

    Raises:
        UserError: Unknown type of file, no such folder, or matplotlib is not installed.
    """
    if path.suffix not in FIGURE_TYPES:
        raise UserError(
            f"--plot {path} has no known type. Let it end in {', '.join(FIGURE_TYPES)}."
        )
    if not path.absolute().parent.is_dir():
        raise UserError(f"--plot {path}: its folder does not exist. Make it, or choose another.")
    try:
        import matplotlib  # noqa: F401 - an extra
    except ImportError as error:
        raise UserError(
            "--plot draws with matplotlib, which is not installed. Run pip install 'dotmoe[plots]'."
        ) from error


def draw_curve(curve: dict[str, Any], path: Path) -> None:
    """Draw perplexity against the share of the model's parameters that work on a token.

    Raises:
        UserError: See `require_drawable`.
    """
    require_drawable(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    points = curve["points"]
    shares = [100 * point["active_parameters"] / curve["dense_parameters"] for point in points]
    perplexities = [point["perplexity"] for point in points]
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(shares, perplexities, marker="o", label="MoE; bold: its k as it is now")
    axes.axhline(
        curve["dense"]["perplexity"], linestyle="--", color="0.5", label="dense: all experts run"
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
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(ScalarFormatter())
    axes.set_xlabel("parameters that work on a token, % of the dense model's")
    axes.set_ylabel(f"perplexity per {curve['unit']} (log)")
    axes.margins(x=0.15, y=0.12)
    axes.legend()
    # Without date and random names the same curve gives the same file.
    with rc_context({"svg.hashsalt": "dotmoe"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
