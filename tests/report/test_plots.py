"""The picture: every text within it and legible, axes that fill it, each model at its numbers."""

from dotmoe.measure.report import RunResults
from dotmoe.measure.report.plots import WIDTH, quality_figure

PHONE_PX = 350
"""Width of a plot on a phone."""


def test_the_picture_shows_every_model_at_its_numbers_with_text_that_can_be_read(measured):
    run = RunResults(measured)
    counts, curve = run.results["parameters"], run.files["curve"]
    figure = quality_figure(run.models, counts, curve)
    (axes,) = figure.axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    active = 100 * counts["active"] / counts["dense"]
    for name, model in run.models.items():
        share = 100.0 if name == "dense" else active
        assert drawn.pop(name) == [[share, model["perplexity"]]]
    (at_other_k,) = drawn.values()
    assert len(at_other_k) == len(curve["points"])
    figure.draw_without_rendering()
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert max(-box.x0, -box.y0, box.x1 - width, box.y1 - height) <= 0
    assert axes.get_position().width >= 0.5
    for text in figure.findobj(lambda artist: hasattr(artist, "get_fontsize")):
        assert text.get_fontsize() / 72 / WIDTH * PHONE_PX >= 7
