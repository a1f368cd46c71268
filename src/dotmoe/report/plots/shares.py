"""Plots of figures side by side: task scores, layers, speeds, parts of a step."""

from typing import Any

from dotmoe.report.plots.style import COLOURS, INK, MARKERS, QUIET, new_figure


def tasks_plot(rows: list[dict[str, Any]], names: list[str]) -> Any:
    """Accuracy of each model with its standard error, beside that of guessing.

    Args:
        rows: A task each: `title`, `chance` (or None), and for each model `scores` and `errors`,
            all from 0 to 1.
        names: Of the models.
    """
    figure = new_figure(1.3 + 0.42 * len(rows))
    axes = figure.add_subplot()
    guessed = [(100 * row["chance"], i) for i, row in enumerate(rows) if row["chance"] is not None]
    for at, index in guessed:
        label = "guessing" if (at, index) == guessed[0] else None
        axes.plot([at, at], [index - 0.4, index + 0.4], color=QUIET, linewidth=3, label=label)
    for model, name in enumerate(names):
        offset = 0.22 * (model - (len(names) - 1) / 2)
        axes.errorbar(
            [100 * row["scores"][model] for row in rows],
            [index + offset for index in range(len(rows))],
            xerr=[100 * (row["errors"][model] or 0) for row in rows],
            linestyle="none",
            marker=MARKERS[model],
            color=COLOURS[model],
            capsize=2,
            label=name,
        )
    axes.set_yticks(range(len(rows)), [row["title"] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_ylabel("task")
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("accuracy, % (bars: one standard error)")
    _legend_above(figure, axes)
    return figure


def closeness_plot(result: dict[str, Any]) -> Any:
    """Error of each FFN's output, relative to the size of the dense one."""
    figure = new_figure(2.4)
    axes = figure.add_subplot()
    layers = [each["layer"] for each in result["ffn"]]
    axes.plot(layers, [each["relative_mse"] for each in result["ffn"]], "o-", color=COLOURS[0])
    axes.set_ylim(bottom=0)
    _whole_numbers(axes.xaxis)
    axes.set_xlabel("layer")
    axes.set_ylabel("FFN output: squared error /\nmean square of the dense one")
    return figure


def speed_plot(points: list[dict[str, Any]], names: list[str]) -> Any:
    """Speed of the MoE over that of the dense model, and what its weights alone would allow."""
    figure = new_figure(1.3 + 0.42 * len(points))
    axes = figure.add_subplot()
    rows = range(len(points))
    ratios = [point["speed_ratio"] for point in points]
    axes.barh(rows, ratios, height=0.55, color=COLOURS[0], label="measured (line: quartiles)")
    for row, point in zip(rows, points, strict=True):
        axes.plot(point["speed_ratio_quartiles"], [row, row], color=INK, linewidth=2)
    axes.plot(
        [point["ideal_ratio"] for point in points],
        rows,
        linestyle="none",
        marker="|",
        markersize=16,
        markeredgewidth=2,
        color=COLOURS[1],
        label="ideal: what the weights allow",
    )
    axes.axvline(1, color=QUIET, linestyle="--", label="as fast as dense")
    axes.set_yticks(rows, names)
    axes.set_ylim(len(points) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.grid(visible=False, axis="y")
    axes.set_ylabel("work")
    axes.set_xlabel("speed, MoE / dense (ratio of tokens per second)")
    _legend_above(figure, axes, columns=2)
    return figure


def parts_plot(shares: dict[str, float], ylabel: str, xlabel: str) -> Any:
    """Shares of a whole, the largest first.

    Args:
        shares: Of each part, 0 to 1.
        ylabel: What the parts are.
        xlabel: What they are shares of.
    """
    figure = new_figure(0.9 + 0.32 * len(shares))
    axes = figure.add_subplot()
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    axes.barh(range(len(ordered)), [100 * share for _, share in ordered], color=COLOURS[0])
    for row, (_, share) in enumerate(ordered):
        axes.annotate(f" {100 * share:.0f} %", (100 * share, row), va="center", textcoords="data")
    axes.set_yticks(range(len(ordered)), [name for name, _ in ordered])
    axes.set_ylim(len(ordered) - 0.4, -0.6)
    axes.margins(x=0.15)
    axes.grid(visible=False, axis="y")
    axes.set_ylabel(ylabel)
    axes.set_xlabel(xlabel)
    return figure


def _legend_above(figure: Any, axes: Any, columns: int = 3) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, frameon=False)


def _whole_numbers(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))
