"""Tables of what `assignment.py` measured."""

from typing import Any

from rich.box import MARKDOWN
from rich.table import Table


def cost_table(cases: list[dict[str, Any]]) -> Table:
    """A row for each method of each case."""
    table = Table(box=MARKDOWN)
    for heading in ("N x E", "stage", "threads"):
        table.add_column(heading)
    for heading in (
        "method",
        "forward ms",
        "backward ms",
        "rounding ms",
        "step ms",
        "times faster",
        "marginal error",
        "peak MiB",
        "of paper's",
    ):
        table.add_column(heading, justify="right")
    for case in cases:
        for name, figures in case["methods"].items():
            table.add_row(
                f"{case['num_neurons']:,} x {case['num_experts']}",
                case["stage"] + ("" if case["flush_denormals"] else ", denormals kept"),
                str(case["threads"]),
                name,
                *(milliseconds(figures[f"{part}_s"]) for part in PARTS),
                milliseconds(figures["seconds"]),
                f"{figures['times_faster']:.1f}" if "times_faster" in figures else "",
                f"{figures['marginal_error']:.1e}",
                f"{figures['peak_bytes'] / 2**20:,.0f}",
                f"{figures['share_of_peak']:.3f}" if "share_of_peak" in figures else "",
            )
    return table


PARTS = ("forward", "backward", "rounding")


def growth_table(cases: list[dict[str, Any]]) -> Table:
    """Time of a step by size, and by entry of the plan."""
    table = Table(box=MARKDOWN)
    for heading in ("N", "E", "N x E", "step ms", "ns an entry", "passes", "peak bytes an entry"):
        table.add_column(heading, justify="right")
    for case in sorted(cases, key=lambda c: (c["num_neurons"] == 16_384, c["num_experts"])):
        figures = case["methods"]["dotmoe"]
        entries = case["num_neurons"] * case["num_experts"]
        table.add_row(
            f"{case['num_neurons']:,}",
            str(case["num_experts"]),
            f"{entries:,}",
            milliseconds(figures["seconds"]),
            f"{1e9 * figures['seconds'] / entries:.1f}",
            str(figures["passes"]),
            f"{figures['peak_bytes'] / entries:.1f}",
        )
    return table


def milliseconds(seconds: float) -> str:
    """With three digits where there are that many."""
    return f"{1e3 * seconds:,.1f}" if seconds < 0.1 else f"{1e3 * seconds:,.0f}"
