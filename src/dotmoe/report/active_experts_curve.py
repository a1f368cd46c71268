"""A curve of perplexity against k: as a table for a terminal, and as a figure."""

from pathlib import Path
from typing import Any

from rich.table import Table

from dotmoe.errors import UserError
from dotmoe.report.plots.lines import curve_plot
from dotmoe.report.plots.style import is_installed, styled
from dotmoe.report.words import millions, percent

FIGURE_TYPES = (".svg", ".png", ".pdf")


def curve_table(curve: dict[str, Any]) -> Table:
    """A row for each k of `dotmoe.evaluate.active_experts_curve`."""
    title = f"perplexity per token, windows of {curve['window']}, {curve['tokens']:,} tokens"
    caption = f"* as the model is now; all experts are the {curve['all_experts']['model']} model"
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    columns = ("k", "FFN", "active parameters", "of all", "perplexity", "nats above k = E")
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
            f"{point['loss_above_all_experts']:.3f}",
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
    if not is_installed():
        raise UserError(
            "--plot draws with matplotlib, which is not installed. Run pip install 'dotmoe[plots]'."
        )


def draw_curve(curve: dict[str, Any], path: Path) -> None:
    """Draw perplexity against the share of the model's parameters that work on a token.

    Raises:
        UserError: See `require_drawable`.
    """
    require_drawable(path)
    with styled():
        # Without date and random names the same curve gives the same file.
        metadata = {"Date": None} if path.suffix == ".svg" else None
        curve_plot(curve).savefig(path, metadata=metadata, dpi=200)
