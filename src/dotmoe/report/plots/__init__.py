"""Every plot that the result files of a run allow; drawn by matplotlib, an extra."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dotmoe.errors import UserError
from dotmoe.report.plots.lines import curve_plot, training_plot
from dotmoe.report.plots.maps import overlap_plot, scatter_plot, utilisation_plot
from dotmoe.report.plots.shares import closeness_plot, parts_plot, speed_plot, tasks_plot
from dotmoe.report.plots.style import Plot, is_installed, styled, written
from dotmoe.report.result_files import ResultFiles, Values
from dotmoe.report.task_scores import main_scores, plot_rows, scores_of

__all__ = [
    "Plot",
    "alignment_steps",
    "bench_name",
    "draw_all",
    "is_installed",
    "overhead_shares",
    "reading",
    "save_all",
]

Draw = Callable[[ResultFiles], Any]


def draw_all(found: ResultFiles, *, in_pixels: bool) -> dict[str, Plot]:
    """Each plot by its name; none of what was not measured.

    matplotlib is imported if there is anything to draw.

    Args:
        found: What was measured.
        in_pixels: Draw each as PNG too, which takes longer than the rest.

    Raises:
        UserError: A result file lacks what a plot shows.
    """
    wanted = {}
    for name, (is_there, draw, file) in _PLOTS.items():
        with reading(found, file):
            if is_there(found):
                wanted[name] = draw
    if not wanted:
        return {}
    drawn = {}
    with styled():
        for name, draw in wanted.items():
            with reading(found, _PLOTS[name][2]):
                figure = draw(found)
            drawn[name] = written(figure, in_pixels=in_pixels)
    return drawn


def save_all(plots: dict[str, Plot], folder: Path) -> None:
    """Write each plot as NAME.svg and NAME.png."""
    if plots:
        folder.mkdir(parents=True, exist_ok=True)
    for name, plot in plots.items():
        (folder / f"{name}.svg").write_text(plot.svg, encoding="utf-8")
        (folder / f"{name}.png").write_bytes(plot.png)


@contextmanager
def reading(found: ResultFiles, file: str) -> Iterator[None]:
    """Say in one line that a result file is not as this version writes it.

    Raises:
        UserError: Something that is read from `file` is not in it, or is of another type.
    """
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise UserError(
            f"{found.run / file} has not what the report shows of it ({type(error).__name__}: "
            f"{error}): it is damaged, or of another version. Delete it, and measure it again."
        ) from error


def alignment_steps(found: ResultFiles) -> list[Values]:
    """Metrics of each step of the alignment; of a finetuned run, from the analysis of it."""
    if found.alignment or "alignment_history" not in found.analyses:
        return found.alignment
    columns = dict(found.analyses["alignment_history"]["values"])
    columns["step"] = columns.pop("steps")
    length = len(columns["step"])
    logged = {n: c for n, c in columns.items() if isinstance(c, list) and len(c) == length}
    return [{name: column[index] for name, column in logged.items()} for index in range(length)]


def overhead_shares(analysis: Values) -> dict[str, float]:
    """Share of a step's time of each of its parts, 0 to 1."""
    shares: dict[str, float] = analysis["values"]["shares"]
    return shares


def bench_name(point: Values) -> str:
    """What a point of the benchmark measures, in words."""
    work = point["point"]
    if work["name"] == "prefill":
        return f"prefill of {work['tokens']} tokens"
    return f"decode at batch {work['batch']}"


def _tasks(found: ResultFiles) -> Any:
    rows, labels = plot_rows(main_scores(scores_of(found)))
    names = {"against": "dense", "model": found.name}
    return tasks_plot(rows, [names[label] for label in labels])


def _speed(found: ResultFiles) -> Any:
    points = found.measured["bench"]["points"]
    return speed_plot(points, [bench_name(point) for point in points])


def _measured(name: str) -> Callable[[ResultFiles], bool]:
    return lambda found: name in found.measured


def _analysed(name: str) -> Callable[[ResultFiles], bool]:
    return lambda found: name in found.analyses


def _values(name: str, draw: Callable[[Values], Any]) -> Draw:
    return lambda found: draw(found.analyses[name]["values"])


_PLOTS: dict[str, tuple[Callable[[ResultFiles], bool], Draw, str]] = {
    "tasks": (lambda f: bool(main_scores(scores_of(f))), _tasks, "6_evaluate/tasks"),
    "active_experts": (
        _measured("curve"),
        lambda f: curve_plot(f.measured["curve"]),
        "6_evaluate/curve.json",
    ),
    "fidelity": (
        lambda f: bool(f.measured.get("fidelity", {}).get("ffn")),
        lambda f: closeness_plot(f.measured["fidelity"]),
        "6_evaluate/fidelity.json",
    ),
    "speed": (_measured("bench"), _speed, "6_evaluate/bench.json"),
    "alignment": (
        lambda f: bool(alignment_steps(f)),
        lambda f: training_plot(alignment_steps(f)),
        "2_align/metrics.jsonl",
    ),
    "recovery": (
        lambda f: bool(f.recovery),
        lambda f: training_plot(f.recovery),
        "4_finetune/metrics.jsonl",
    ),
    "expert_utilisation": (
        _analysed("expert_utilisation"),
        _values("expert_utilisation", utilisation_plot),
        "6_evaluate/analysis/expert_utilisation.json",
    ),
    "routing_overlap": (
        _analysed("routing_overlap"),
        _values("routing_overlap", overlap_plot),
        "6_evaluate/analysis/routing_overlap.json",
    ),
    "expert_outputs_tsne": (
        _analysed("expert_outputs_tsne"),
        _values("expert_outputs_tsne", scatter_plot),
        "6_evaluate/analysis/expert_outputs_tsne.json",
    ),
    "overhead_profile": (
        _analysed("overhead_profile"),
        lambda f: parts_plot(
            overhead_shares(f.analyses["overhead_profile"]),
            "part of a step",
            "share of the time of an alignment step, %",
        ),
        "6_evaluate/analysis/overhead_profile.json",
    ),
}
"""By name: whether it can be drawn, how, and the file it shows."""
