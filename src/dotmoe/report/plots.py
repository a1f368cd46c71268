"""Every plot of results; drawn by matplotlib, an extra. The same results give the same file.

Plots are as wide as a phone, so that their text stays readable there, and use colours that people
with any kind of colour vision tell apart (Okabe and Ito's); lines differ in dash, points in shape.
"""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dotmoe.errors import UserError
from dotmoe.report.read import RunResults
from dotmoe.report.tables import bench_name

Values = dict[str, Any]

NO_PLOTS = "matplotlib is not installed, so there are no plots: pip install 'dotmoe[plots]'."
FIGURE_TYPES = (".svg", ".png", ".pdf")
WIDTH = 4.8
"""Inches, of every plot."""
MOST_POINTS = 300
"""Points of a line; more are averaged in groups."""
INK, PAPER, GRID, QUIET = "#1f2328", "#ffffff", "#d3d8de", "#808890"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D")

_SETTINGS: dict[str, Any] = {
    "svg.hashsalt": "dotmoe",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    **{f"{part}.color": INK for part in ("text", "xtick", "ytick")},
    **{f"axes.{part}color": INK for part in ("edge", "label")},
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


def is_installed() -> bool:
    """Whether plots can be drawn."""
    return find_spec("matplotlib") is not None


@contextmanager
def styled() -> Iterator[None]:
    """Figures that are made and saved within look as the page wants them."""
    from matplotlib import rc_context

    with rc_context(_SETTINGS):
        yield


@styled()
def as_svg(figure: Any) -> bytes:
    """The figure as an SVG file, its text as outlines: it looks the same everywhere."""
    svg = io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    return svg.getvalue()


def save(figures: dict[str, Any], folder: Path) -> None:
    """Write each figure as NAME.svg and NAME.png."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        (folder / f"{name}.svg").write_bytes(as_svg(figure))
        figure.savefig(folder / f"{name}.png", dpi=200, metadata={"Software": None})


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


@styled()
def draw_curve(curve: Values, path: Path) -> None:
    """Draw perplexity against the share of the parameters that work on a token, into a file.

    Raises:
        UserError: See `require_drawable`.
    """
    require_drawable(path)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    curve_plot(curve).savefig(path, metadata=metadata, dpi=200)


# --- one function a plot ------------------------------------------------------------------------


def training_plot(steps: list[Values]) -> Any:
    """Losses against steps; below them a panel each for temperature, moves and soft-hard gap."""
    losses = {"loss": "loss", "ce": "CE, next token", "kl": "KL to dense"}
    losses = {key: name for key, name in losses.items() if key in steps[0]}
    if len(losses) == 2:  # a loss of one term is that term
        losses.pop("loss", None)
    below = {"tau": "tau", "moved_fraction": "moved, %", "soft_hard_gap": "soft-hard\ngap, %"}
    below = {key: name for key, name in below.items() if key in steps[0]}
    ratios = {"height_ratios": [2.2] + [1.0] * len(below), "sharex": True, "squeeze": False}
    figure = _figure(2.6 + 1.1 * len(below))
    panels = figure.subplots(1 + len(below), 1, **ratios)[:, 0]
    for index, (key, name) in enumerate(losses.items()):
        _line(panels[0], steps, key, index, name)
    _log_axis(panels[0].yaxis)
    panels[0].set_ylabel("nats a token (log)")
    for axes, (key, name) in zip(panels[1:], below.items(), strict=True):
        _line(axes, steps, key, factor=1 if key == "tau" else 100)
        axes.set(ylabel=name, ylim=(0, 1.1 * axes.dataLim.y1))
    panels[-1].set_xlabel("step")
    figure.align_ylabels()
    return _with_legend(figure, panels[0])


def curve_plot(curve: Values) -> Any:
    """Perplexity against the share of the parameters that work on a token, at several k."""
    figure, axes = _axes(3.2)
    points = curve["points"]
    shares = [100 * point["active_parameters"] / curve["dense_parameters"] for point in points]
    perplexities = [point["perplexity"] for point in points]
    axes.plot(shares, perplexities, marker="o", color=COLOURS[0], label="bold: k as it is now")
    everything = f"{curve['all_experts']['model']}: all experts run"
    axes.axhline(perplexities[-1], linestyle="--", color=QUIET, label=everything)
    for point, share in zip(points, shares, strict=True):
        is_now = point["active_experts"] == curve["active_experts"]
        place, weight = (share, point["perplexity"]), "bold" if is_now else "normal"
        label = {"textcoords": "offset points", "xytext": (6, 6), "fontweight": weight}
        axes.annotate(f"k = {point['active_experts']}", place, **label)
    _log_axis(axes.yaxis)
    axes.set(xlabel="parameters that work on a token, % of dense")
    axes.set(ylabel=f"perplexity per {curve['unit']} (log)")
    axes.margins(x=0.2, y=0.15)
    return _with_legend(figure, axes)


def tasks_plot(scores: list[Values], others: list[Values], names: tuple[str, str]) -> Any:
    """Accuracy in each task with its standard error, beside that of guessing."""
    figure, axes = _axes(1.4 + 0.42 * len(scores))
    rows = {score["task"]: row for row, score in enumerate(scores)}
    guessed = [score for score in scores if score["chance"] is not None]
    tick = {"marker": "|", "s": 400, "linewidths": 3, "color": QUIET, "label": "guessing"}
    axes.scatter([100 * s["chance"] for s in guessed], [rows[s["task"]] for s in guessed], **tick)
    for index, (side, name) in enumerate(zip((others, scores), names, strict=True)):
        axes.errorbar(
            [100 * score["value"] for score in side],
            [rows[score["task"]] + 0.22 * (index - 0.5) for score in side],
            xerr=[100 * (score["stderr"] or 0) for score in side],
            linestyle="none",
            marker=MARKERS[index],
            color=COLOURS[index],
            capsize=2,
            label=(name if len(name) <= 20 else f"...{name[-17:]}") if side else None,
        )
    _rows(axes, [f"{score['task']} ({score['shots']}-shot)" for score in scores])
    axes.set(xlabel="accuracy, % (bars: one standard error)")
    return _with_legend(figure, axes)


def closeness_plot(ffn: list[Values]) -> Any:
    """Error of each FFN's output, relative to the size of the dense one."""
    figure, axes = _axes(2.4)
    layers = [str(each["layer"]) for each in ffn]
    axes.plot([each["relative_mse"] for each in ffn], "o-", color=COLOURS[0])
    _layers(axes.xaxis, layers)
    axes.set(xlabel="layer", ylabel="FFN output: MSE /\nmean square of dense", ylim=(0, None))
    return figure


def speed_plot(points: list[Values]) -> Any:
    """Speed of the MoE over that of the dense model, and what its weights alone would allow."""
    figure, axes = _axes(1.4 + 0.5 * len(points))
    rows = range(len(points))
    ratios = [point["speed_ratio"] for point in points]
    axes.barh(rows, ratios, height=0.4, color=COLOURS[0], label="measured (best tenth)")
    low, high = zip(*(point["speed_ratio_quartiles"] for point in points), strict=True)
    below = [row + 0.32 for row in rows]
    axes.hlines(below, low, high, color=INK, linewidth=2, label="rounds, middle half")
    tick = {"marker": "|", "s": 256, "linewidths": 2, "color": COLOURS[1]}
    ideal = [point["ideal_ratio"] for point in points]
    axes.scatter(ideal, rows, **tick, label="what the weights allow")
    axes.axvline(1, color=QUIET, linestyle="--", label="as fast as dense")
    _rows(axes, [bench_name(point).replace(" ", "\n", 1) for point in points])
    axes.set(xlabel="speed, MoE / dense", xlim=(0, None))
    return _with_legend(figure, axes, columns=2)


def utilisation_plot(values: Values) -> Any:
    """Share of the tokens that run each expert, layer by layer, the busiest expert first."""
    shares = [sorted((100 * s for s in layer), reverse=True) for layer in values["share_LE"]]
    figure, axes = _axes(max(2.2, min(4.5, 1.2 + 0.16 * len(shares))))
    _map(figure, axes, shares, "tokens that run it, %", aspect="auto")
    _layers(axes.yaxis, values["layers"])
    axes.set(xlabel="expert of its layer, busiest first (rank)", ylabel="layer")
    return figure


def overlap_plot(values: Values) -> Any:
    """How alike the layers route, each with each other; the diagonal, which is 1, is left blank."""
    cells = {
        (a, b): value
        for a, row in enumerate(values["similarity_LL"])
        for b, value in enumerate(row)
        if a != b
    }
    layers = range(len(values["layers"]))
    most = max([0.05, *cells.values()])
    shown = [[cells.get((a, b), float("nan")) for b in layers] for a in layers]
    figure, axes = _axes(3.8)
    _map(figure, axes, shown, "routing shared above chance (1: all)", vmax=most)
    for (a, b), value in cells.items() if len(layers) <= 8 else ():
        colour = "white" if value < most / 2 else "black"
        axes.annotate(f"{value:.2f}", (b, a), ha="center", va="center", color=colour)
    _layers(axes.yaxis, values["layers"])
    _layers(axes.xaxis, values["layers"])
    axes.set(xlabel="layer", ylabel="layer")
    return figure


def scatter_plot(values: Values) -> Any:
    """Expert outputs in two dimensions: four experts marked, the others in grey."""
    figure, axes = _axes(4.4)
    by_expert: dict[int, list[Any]] = {}
    for point, expert in zip(values["points"], values["expert"], strict=True):
        by_expert.setdefault(expert, []).append(point)
    order = sorted(by_expert, key=lambda expert: (-len(by_expert[expert]), expert))
    marked, others = order[: len(COLOURS)], order[len(COLOURS) :]
    style: Values = {"linewidths": 0, "rasterized": True}
    if others:
        grey = zip(*(point for expert in others for point in by_expert[expert]), strict=True)
        axes.scatter(*grey, s=6, color=QUIET, alpha=0.4, label=f"{len(others)} others", **style)
    for expert, colour, marker in zip(marked, COLOURS, MARKERS, strict=False):
        own = zip(*by_expert[expert], strict=True)
        axes.scatter(*own, s=14, color=colour, marker=marker, label=f"expert {expert}", **style)
    axes.grid(visible=False)
    axes.set(xlabel="t-SNE dimension 1 (no unit)", ylabel="t-SNE dimension 2 (no unit)")
    return _with_legend(figure, axes)


def parts_plot(shares: dict[str, float]) -> Any:
    """Shares of the time of an alignment step, the largest first."""
    figure, axes = _axes(0.9 + 0.32 * len(shares))
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    axes.barh(range(len(ordered)), [100 * share for _, share in ordered], color=COLOURS[0])
    for row, (_, share) in enumerate(ordered):
        axes.annotate(f" {100 * share:.1f} %", (100 * share, row), va="center")
    _rows(axes, [name for name, _ in ordered])
    axes.margins(x=0.25)
    axes.set(xlabel="share of a step's time, %")
    return figure


# --- what of a run is drawn ---------------------------------------------------------------------

PLOTS: dict[str, tuple[str, Callable[[Values], Any]]] = {
    "active_experts": ("curve", curve_plot),
    "fidelity": ("fidelity", lambda result: closeness_plot(result["ffn"])),
    "speed": ("bench", lambda result: speed_plot(result["points"])),
    "expert_utilisation": (
        "analysis/expert_utilisation",
        lambda analysis: utilisation_plot(analysis["values"]),
    ),
    "routing_overlap": (
        "analysis/routing_overlap",
        lambda analysis: overlap_plot(analysis["values"]),
    ),
    "expert_outputs_tsne": (
        "analysis/expert_outputs_tsne",
        lambda analysis: scatter_plot(analysis["values"]),
    ),
    "overhead_profile": (
        "analysis/overhead_profile",
        lambda analysis: parts_plot(analysis["values"]["shares"]),
    ),
}
"""Plots of one file of `6_evaluate`: its path there without `.json`, and what draws it."""


@styled()
def draw_all(found: RunResults) -> dict[str, Any]:
    """Every figure that the results of a run allow, by name.

    Raises:
        UserError: A result file lacks what a plot shows.
    """
    figures = {}
    for name, (file, draw) in PLOTS.items():
        if file in found.files:
            with found.reading(f"6_evaluate/{file}.json"):
                figures[name] = draw(found.files[file])
    others, own = found.main_scores()
    with found.reading("6_evaluate/tasks"):
        if own:
            figures["tasks"] = tasks_plot(own, others, (found.against, found.name))
    for name, steps in {"alignment": found.alignment_steps(), "finetune": found.finetuned}.items():
        if steps:
            figures[name] = training_plot(steps)
    return figures


# --- pieces of plots ----------------------------------------------------------------------------


def _figure(height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def _axes(height: float) -> tuple[Any, Any]:
    figure = _figure(height)
    return figure, figure.add_subplot()


def _with_legend(figure: Any, axes: Any, columns: int = 3) -> Any:
    """The legend above all axes, where it takes height and never width."""
    spacing = {"columnspacing": 1.2, "handlelength": 1.6, "handletextpad": 0.5}
    drawn = axes.get_legend_handles_labels()
    figure.legend(*drawn, loc="outside upper left", ncols=columns, **spacing)
    return figure


def _line(
    axes: Any, steps: list[Values], key: str, index: int = 0, label: str = "", factor: float = 1.0
) -> None:
    """A metric, faint as it is, and strong as the mean of the last twentieth of the steps."""
    import numpy as np

    at = np.array([float(step["step"]) for step in steps])
    values = factor * np.array([step.get(key) for step in steps], dtype=float)  # None: NaN
    totals = np.cumsum([np.nan_to_num(values), ~np.isnan(values)], axis=1)
    window = max(1, len(steps) // 20)
    totals[:, window:] -= totals[:, :-window].copy()
    with np.errstate(invalid="ignore"):
        smooth = totals[0] / totals[1]
    at, values, smooth = (thinned(column) for column in (at, values, smooth))
    axes.plot(at, values, color=COLOURS[index], alpha=0.3, linewidth=0.8)
    axes.plot(at, smooth, color=COLOURS[index], linestyle=DASHES[index], label=label)


def thinned(values: Any, most: int = MOST_POINTS) -> Any:
    """Means of neighbours, at most `most` of them.

    Example:
        >>> import numpy as np
        >>> thinned(np.array([1.0, 3.0, 5.0, 7.0, 9.0]), 3).tolist()
        [2.0, 6.0, 9.0]
    """
    import numpy as np

    starts = np.arange(0, len(values), -(-len(values) // most))
    return np.add.reduceat(values, starts) / np.diff([*starts, len(values)])


def _log_axis(axis: Any) -> None:
    """Plain numbers on a logarithmic axis, also where it spans less than a decade."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.axes.set_yscale("log")
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _rows(axes: Any, names: list[str]) -> None:
    """One row a name, the first on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def _map(figure: Any, axes: Any, rows: list[list[float]], label: str, **options: Any) -> None:
    image = axes.imshow(rows, cmap="cividis", vmin=0, interpolation="none", **options)
    bar = figure.colorbar(image, ax=axes, label=label)
    bar.solids.set_rasterized(True)
    bar.outline.set_visible(False)
    axes.grid(visible=False)


def _layers(axis: Any, layers: list[Any]) -> None:
    """Numbers of the layers, as many as fit."""
    step = -(-len(layers) // 12)
    axis.set_ticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
