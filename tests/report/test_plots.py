"""Plots: every text within its picture, axes that fill it, the same file each time."""

import json
import math

import pytest
from pages import ROOT

from dotmoe.cli import run
from dotmoe.report.plots import as_svg, draw_all, speed_plot, tasks_plot, thinned, training_plot
from dotmoe.report.read import read_run

pytest.importorskip("matplotlib")

CASES = json.loads((ROOT / "results" / "serving_speed.json").read_text())["cases"]
LONG = "a/rather/long/path/to/another/model/that/nobody/shortens"
SCORES = [
    {"task": f"arc_challenge_{n}", "shots": 25, "chance": 0.25, "value": 0.5, "stderr": 0.03}
    for n in range(3)
]


def outside_and_width(figure):
    """How far anything drawn leaves the canvas, in inches, and the narrowest axes' share of it."""
    figure.draw_without_rendering()
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    wide = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    outside = max(-box.x0, -box.y0, box.x1 - width, box.y1 - height)
    return outside, min(axes.get_position().width for axes in wide)


def test_no_text_leaves_its_picture_and_axes_fill_it(measured):
    figures = draw_all(read_run(measured))
    assert set(figures) == {
        "active_experts",
        "alignment",
        "expert_outputs_tsne",
        "expert_utilisation",
        "fidelity",
        "overhead_profile",
        "routing_overlap",
        "speed",
        "tasks",
    }
    figures |= {name: speed_plot(case["points"]) for name, case in CASES.items()}
    figures["long names"] = tasks_plot(SCORES, SCORES, (LONG, "DOT-MoE"))
    for name, figure in figures.items():
        outside, width = outside_and_width(figure)
        assert outside <= 0, name
        assert width >= 0.5, name
        assert all(axes.get_xlabel() for axes in figure.axes[-1:] if axes.get_label() == "")


def test_the_alignment_keeps_its_width_beside_long_names(measured):
    steps = read_run(measured).aligned
    assert {"soft_hard_gap", "moved_fraction", "tau"} <= set(steps[0])
    outside, width = outside_and_width(training_plot(steps))
    assert outside <= 0
    assert width > 0.75


def test_a_speed_has_its_spread_on_a_line_of_its_own():
    figure = speed_plot(next(iter(CASES.values()))["points"])
    bars = {round(bar.get_y() + bar.get_height() / 2, 3) for bar in figure.axes[0].patches}
    spreads = {round(float(line[0][1]), 3) for line in figure.axes[0].collections[0].get_segments()}
    assert not bars & spreads


def test_few_experts_are_marked_among_many(measured):
    found = read_run(measured)
    axes = draw_all(found)["expert_outputs_tsne"].axes[0]
    names = [name for name in axes.get_legend_handles_labels()[1] if name.startswith("expert")]
    shown = {len(points.get_offsets()) for points in axes.collections}
    assert len(names) <= 4
    assert all(shown)
    assert not axes.lines  # no zero lines, which mean nothing there


def test_the_same_results_give_the_same_files(measured):
    one, two = draw_all(read_run(measured)), draw_all(read_run(measured))
    assert {name: as_svg(figure) for name, figure in one.items()} == {
        name: as_svg(figure) for name, figure in two.items()
    }


def test_the_command_saves_each_plot_twice(measured, tmp_path):
    assert run(["report", str(measured)]) == 0
    names = {path.name for path in (measured / "7_report" / "plots").iterdir()}
    assert {"alignment.svg", "alignment.png", "speed.svg"} <= names


def test_thinned_lines_are_means_of_neighbours():
    import numpy as np

    values = np.arange(1000.0)
    means = thinned(values, 300)
    assert len(means) == 250
    assert means[:2].tolist() == [1.5, 5.5]
    steps = [{"step": step, "ce": None if step == 3 else 2.0} for step in range(1, 12)]
    line = training_plot(steps).axes[0].lines[1].get_ydata()
    assert not any(math.isnan(value) and index != 2 for index, value in enumerate(line))
