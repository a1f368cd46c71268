"""Draw the pictures of results from the JSON files, as SVG for light and dark pages.

python scripts/draw_results.py      # writes docs/figures/{loss,kept,size,speed}{,-dark}.svg
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from document_tables.campaigns import campaign_records
from document_tables.comparisons import compared
from document_tables.front_page import gemma_by_default, qwen_by_default, smollm2_by_default
from document_tables.records import ROOT, load
from dotmoe.common.tables import percent

INK = {"": "#1f2328", "-dark": "#e6e9ed"}
"""Colour of text and axes, by the end of the file's name."""
COLOURS = {"frozen": "#808890", "repaired": "#0072b2", "finetuned": "#009e73", "other": "#d55e00"}
SIZES: list[tuple[str, int, Callable[[], tuple[str, str]]]] = [
    ("SmolLM2", 135, smollm2_by_default),
    ("Gemma 3", 270, gemma_by_default),
    ("Qwen2.5-Coder", 494, qwen_by_default),
]
"""Models of the table of sizes: millions of parameters, and their loss on books and WikiText-2."""
Points = dict[str, list[tuple[float, float]]]
"""Share of the FFN active in percent, and perplexity times dense, by series."""


def smollm2() -> Points:
    """SmolLM2-135M, frozen, repaired and finetuned, on WikiText-2."""
    dense, *rows = load("results/smollm2.json").rows
    found: Points = {}
    for row in rows:
        name = row.training.replace("repaired, ", "").rstrip(" *")
        times = row.perplexity.wiki / dense.perplexity.wiki
        found.setdefault(name, []).append((100 * row.active_fraction, times))
    return found


def qwen() -> Points:
    """Qwen2.5-Coder-0.5B on WikiText-2: dotmoe, and two other methods with half active."""
    names = {
        "dotmoe": "dotmoe, repaired",
        "dotmoe, a quarter": "dotmoe, repaired",
        "dotmoe, three quarters": "dotmoe, repaired",
        "static_pruning": "static pruning, repaired",
        "CMoE, 8 experts": "CMoE, repaired",
    }
    found: Points = {}
    for row in compared(load("results/qwen_rows.json").rows):
        if row.texts and row.name in names:
            times = row.texts.wiki.perplexity / row.dense.texts.wiki.perplexity
            found.setdefault(names[row.name], []).append((100 * row.active_fraction, times))
    return found


def figure() -> Figure:
    """Loss against the active share of the FFN, a panel for each model."""
    drawn = Figure(figsize=(7.2, 3.2), layout="constrained")
    panels = zip(
        drawn.subplots(1, 2, sharey=True),
        (("SmolLM2-135M", smollm2()), ("Qwen2.5-Coder-0.5B", qwen())),
        strict=True,
    )
    for axes, (title, points) in panels:
        for name, line in points.items():
            x, y = zip(*sorted(line), strict=True)
            kind = name.removeprefix("dotmoe, ")
            colour = COLOURS.get(kind, COLOURS["other"])
            marker = "s" if name.startswith("CMoE") else "o"
            axes.plot(x, y, marker=marker, color=colour, label=name)
        axes.set(title=title, xlabel="FFN active, %", yscale="log", ylim=(0.95, 10))
        axes.set_yticks([1, 2, 4, 8], ["1", "2", "4", "8"])
        axes.minorticks_off()
        axes.legend()
    drawn.axes[0].set_ylabel("perplexity, times dense")
    return drawn


def campaigns() -> list[tuple[str, list[tuple[str, float, float]]]]:
    """Of each campaign its model's title, and name, KL and its error of each row on own answers."""
    panels = []
    for record in campaign_records().values():
        points = []
        for row in record["rows"]:
            others = row["measures"].get("answers", {}).get("others")
            if others and row["name"] != "dense":
                name = f"{row['what']}, {percent(row['share'])}" if row["share"] else row["what"]
                points.append((name, others["kl"], others["kl_stderr"] or 0.0))
        panels.append((record["model"]["title"], points))
    return panels


def kept() -> Figure:
    """How far each row of each campaign is from the dense model on its held-out answers."""
    panels = campaigns()
    heights = [len(points) for _, points in panels]
    drawn = Figure(figsize=(7.2, 0.9 * len(panels) + 0.3 * sum(heights)), layout="constrained")
    grid = drawn.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)
    for axes, (title, points) in zip(grid[:, 0], panels, strict=True):
        for place, (name, kl, error) in enumerate(points):
            colour = COLOURS["repaired" if name.startswith("dotmoe") else "other"]
            axes.errorbar(kl, place, xerr=error, fmt="o", color=colour, capsize=3)
        axes.set(title=title, ylim=(len(points) - 0.5, -0.5))
        axes.set_yticks(range(len(points)), [name for name, *_ in points])
    drawn.axes[-1].set_xlim(0, None)  # of all panels, which share it
    drawn.axes[-1].set_xlabel("KL to the dense model per token of its held-out answers, nats")
    return drawn


def losses_by_size() -> list[tuple[str, float, float, float]]:
    """Of each model of the table of sizes its name, millions of parameters, loss and its error."""
    found = list[tuple[str, float, float, float]]()
    for name, millions, measured in SIZES:
        for text, cell in zip(("books", "WikiText-2"), measured(), strict=True):
            times, _, error = cell.partition(" ± ")
            found.append((f"{name}, {text}", millions, float(times), float(error)))
    return found


def size() -> Figure:
    """Loss of perplexity with half of the FFN active, by the size of the model."""
    drawn = Figure(figsize=(7.2, 3.0), layout="constrained")
    axes = drawn.subplots()
    for text, colour in (("books", COLOURS["repaired"]), ("WikiText-2", COLOURS["other"])):
        points = [each for each in losses_by_size() if each[0].endswith(text)]
        _, sizes, times, errors = zip(*points, strict=True)
        axes.errorbar(sizes, times, yerr=errors, fmt="o", color=colour, capsize=3, label=text)
    for name, millions, *_ in SIZES:
        axes.annotate(name, (millions, 1.0), ha="center", va="bottom", fontsize=8)
    axes.set(xlabel="parameters, millions", ylabel="perplexity, times dense", xscale="log")
    axes.set(ylim=(0.98, 2), xlim=(100, 700))
    axes.set_xticks([135, 270, 500], ["135", "270", "500"])
    axes.minorticks_off()
    axes.legend()
    return drawn


def speeds() -> dict[str, list[tuple[int, float]]]:
    """Of each runtime the batch sizes, and its speed of decoding relative to dense."""
    cases = load("results/serving_speed.json").cases
    return {
        name.split(",")[0]: [
            (point.point.batch, point.speed_ratio)
            for point in case.points
            if point.point.name == "decode"
        ]
        for name, case in cases.items()
        if name.endswith(" 8")
    }


def speed() -> Figure:
    """Speed of decoding relative to dense, by batch size."""
    drawn = Figure(figsize=(7.2, 3.0), layout="constrained")
    axes = drawn.subplots()
    for name, line in speeds().items():
        batches, ratios = zip(*line, strict=True)
        axes.plot(batches, ratios, marker="o", label=name)
    axes.axhline(1.0, color=COLOURS["frozen"], linestyle=":")
    axes.set(xlabel="sequences at once", ylabel="tokens per second, times dense", xscale="log")
    axes.set_xticks([1, 4, 16], ["1", "4", "16"])
    axes.minorticks_off()
    axes.set(ylim=(0, None))
    axes.legend()
    return drawn


FIGURES = {"loss": figure, "kept": kept, "size": size, "speed": speed}
"""Pictures by the names of their files."""


def draw(folder: Path) -> None:
    """Write the pictures for light and for dark pages."""
    for end, ink in INK.items():
        of_ink = ("text.color", "xtick.color", "ytick.color", "axes.edgecolor", "axes.labelcolor")
        style: dict[str, Any] = {
            **dict.fromkeys(of_ink, ink),
            "svg.hashsalt": "dotmoe",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "legend.frameon": False,
        }
        with rc_context(style):
            metadata = {"Date": None, "Creator": None}
            for name, make in FIGURES.items():
                make().savefig(folder / f"{name}{end}.svg", transparent=True, metadata=metadata)


def main() -> int:
    argparse.ArgumentParser(description="Draw the pictures of results as SVG.").parse_args()
    draw(ROOT / "docs" / "figures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
