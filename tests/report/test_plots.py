"""Plots: all that can be drawn, named axes, the same file each time, and honest means."""

import re
from xml.etree import ElementTree

import pytest
from written_runs import write_quickstart, write_run

from dotmoe.cli import run
from dotmoe.report.plots import draw_all
from dotmoe.report.plots.style import thinned
from dotmoe.report.result_files import read_run

pytest.importorskip("matplotlib")

AXES = {
    "tasks": ("accuracy, % (bars: one standard error)", "task"),
    "active_experts": (
        "parameters that work on a token, % of the dense model's",
        "perplexity per token (log)",
    ),
    "fidelity": ("layer", "FFN output: squared error /", "mean square of the dense one"),
    "speed": ("speed, MoE / dense (ratio of tokens per second)", "work"),
    "alignment": ("step", "nats a token (log)", "tau", "(affinity)", "%"),
    "recovery": ("step", "nats a token (log)"),
    "expert_utilisation": (
        "expert of its layer, busiest first (rank)",
        "layer",
        "tokens that run it, %",
    ),
    "routing_overlap": ("layer", "routing shared above chance (1: all)"),
    "expert_outputs_tsne": (
        "t-SNE dimension 1 (no unit)",
        "t-SNE dimension 2 (no unit)",
        "expert (number)",
    ),
    "overhead_profile": ("share of the time of an alignment step, %", "part of a step"),
}
"""What each axis is called, with its unit."""


def texts_of(svg):
    root = ElementTree.fromstring(svg)
    return ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]


@pytest.fixture(scope="module")
def drawn(drawn_again, tmp_path_factory):
    tuned = write_run(tmp_path_factory.mktemp("plots") / "tuned", measured=False, finetuned=True)
    return drawn_again | draw_all(read_run(tuned), in_pixels=False)


def test_every_axis_of_every_plot_has_a_name(drawn):
    assert drawn.keys() == AXES.keys()
    for name, labels in AXES.items():
        assert set(labels) <= set(texts_of(drawn[name].svg)), name


def test_plots_show_the_figures(drawn):
    shown = texts_of(drawn["active_experts"].svg)
    assert {"k = 1", "k = 2", "k = 4", "k = 6"} <= set(shown)
    assert " 55 %" in texts_of(drawn["overhead_profile"].svg)
    assert texts_of(drawn["routing_overlap"].svg).count("0.23") == 2
    assert {"dense", "DOT-MoE", "guessing"} <= set(texts_of(drawn["tasks"].svg))


def test_a_plot_in_a_page_has_names_of_its_own_and_follows_its_colours(drawn):
    inline = drawn["tasks"].in_page("tasks", 'a "label" <b>')
    root = ElementTree.fromstring(re.sub(r"xlink:href", "href", inline))
    ids = [node.get("id") for node in root.iter() if node.get("id")]
    assert ids
    assert all(name.startswith("tasks-") for name in ids)
    used = re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", inline)
    assert used
    assert set(used) <= set(ids)
    assert root.get("aria-label") == 'a "label" <b>'
    assert "currentColor" in inline
    assert "#1f2328" not in inline


def test_the_command_writes_each_plot_as_svg_and_png(tmp_path):
    folder = write_quickstart(tmp_path / "quick")
    first = {}
    for _ in range(2):
        assert run(["report", str(folder)]) == 0
        files = sorted((folder / "plots").iterdir())
        assert [file.name for file in files] == ["alignment.png", "alignment.svg"]
        assert files[0].read_bytes()[:4] == b"\x89PNG"
        made = {file.name: file.read_bytes() for file in files}
        assert made == (first := first or made)


def test_many_values_are_thinned_to_means():
    values = [float(i) for i in range(1000)]
    means, size = thinned(values, 300)
    assert size == 4
    assert len(means) == 250
    assert means[0] == 1.5
    assert sum(means) / len(means) == pytest.approx(sum(values) / len(values))
