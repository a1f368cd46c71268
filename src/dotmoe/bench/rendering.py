"""A benchmark as a table for a terminal."""

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dotmoe.bench.results import BenchModel, BenchResult, PointResult
from dotmoe.inspection.units import in_bytes

_MIB = 2**20


def render(result: BenchResult) -> RenderableType:
    """Both models, then a line for each point: speed, ratio, ideal ratio, memory."""
    return Group(_models(result), _speeds(result), _works(result), _notes(result))


def _models(result: BenchResult) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    grid.add_row("dense", _described(result.dense))
    grid.add_row("MoE", _described(result.moe))
    settings, made = result.settings, result.provenance
    where = made["hardware"] if settings["device"].startswith("cuda") else made["processor"]
    grid.add_row(
        "run by",
        f"{result.runtime} on {where or made['hardware']}, {settings['threads']} threads, "
        f"{settings['rounds']} rounds in turns",
    )
    return Group(grid, "")


def _described(model: BenchModel) -> str:
    loaded, weights = model.loaded, model.loaded.weights
    split = ""
    if weights.num_experts:
        split = f", {weights.active_experts} of {weights.num_experts} experts"
    return (
        f"{model.name} ({loaded.dtype}{split}): weights {in_bytes(weights.stored_bytes)}, "
        f"loading {in_bytes(loaded.loading_peak_bytes)} at most, of which "
        f"{in_bytes(loaded.before_bytes)} before"
    )


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=index > 0)
    return table


def _speeds(result: BenchResult) -> RenderableType:
    unit = "tokens/s" if result.settings["clock"] == "wall" else "tokens/CPU s"
    table = _table(unit, "dense", "MoE", "ratio", "quartiles", "ideal", "of ideal")
    for each in result.points:
        low, high = each.speed_ratio_quartiles
        table.add_row(
            _name(each),
            f"{each.dense.tokens_per_s:,.1f}",
            f"{each.moe.tokens_per_s:,.1f}",
            f"{each.speed_ratio:.2f}",
            f"{low:.2f}-{high:.2f}",
            f"{each.ideal_ratio:.2f}",
            f"{each.share_of_ideal:.0%}",
        )
    return table


def _works(result: BenchResult) -> RenderableType:
    table = _table("dense / MoE", "weights read, MiB", "MFLOP a token", "experts", "peak, MiB")
    for each in result.points:
        dense, moe = each.dense, each.moe
        table.add_row(
            _name(each),
            f"{dense.weight_bytes / _MIB:,.1f} / {moe.weight_bytes / _MIB:,.1f}",
            f"{dense.flops_per_token / 1e6:,.1f} / {moe.flops_per_token / 1e6:,.1f}",
            f"{moe.experts_touched:.1f}",
            f"{dense.peak_bytes / _MIB:,.0f} / {moe.peak_bytes / _MIB:,.0f}",
        )
    return table


def _notes(result: BenchResult) -> Text:
    origins = {each.moe.experts_touched_by for each in result.points}
    return Text(
        "ratio: MoE / dense, best decile of all steps; quartiles: over rounds, median times. "
        "ideal: bytes of weights read (decode), FLOPs (prefill), dense / MoE. experts: distinct "
        f"ones a layer and step, {', '.join(sorted(origins))}. peak: memory of the process on a "
        "CPU, allocated on a GPU.",
        style="dim",
    )


def _name(each: PointResult) -> str:
    point = each.point
    if point.name == "prefill":
        return f"prefill {point.tokens}"
    return f"decode x {point.batch}"
