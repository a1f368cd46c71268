"""Plots: every text within its picture and legible, axes that fill it, the same file each time."""

import pytest

from dotmoe.measure.report import RunResults
from dotmoe.measure.report.plots import PLOTS, WIDTH, draw_all

pytest.importorskip("matplotlib")

PHONE_PX = 350
"""Width of a plot on a phone."""


@pytest.fixture(scope="module")
def figures(measured):
    return draw_all(RunResults(measured))


def overhang(figure):
    """Inches by which what is drawn leaves the picture."""
    figure.draw_without_rendering()
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    return max(-box.x0, -box.y0, box.x1 - width, box.y1 - height)


def test_no_text_leaves_its_picture_and_axes_fill_it(figures):
    assert set(figures) == {"models", "alignment", *PLOTS}
    for name, figure in figures.items():
        assert overhang(figure) <= 0, name
        axes = [each for each in figure.axes if each.get_label() != "<colorbar>"]
        assert min(each.get_position().width for each in axes) >= 0.5, name
        assert all(each.get_xlabel() for each in figure.axes[-1:] if each.get_label() == "")
        for text in figure.findobj(lambda artist: hasattr(artist, "get_fontsize")):
            assert text.get_fontsize() / 72 / WIDTH * PHONE_PX >= 7, name


def test_few_experts_are_marked_among_many(figures):
    axes = figures["expert_outputs_tsne"].axes[0]
    names = [name for name in axes.get_legend_handles_labels()[1] if name.startswith("expert")]
    assert len(names) <= 4
    assert all(len(points.get_offsets()) for points in axes.collections)
    assert not axes.lines  # no zero lines, which mean nothing there
