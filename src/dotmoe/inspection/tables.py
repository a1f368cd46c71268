"""An inspection as tables for a terminal of 80 columns or more."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dotmoe.inspection.inspect_model import Inspection
from dotmoe.inspection.plan_tables import plan_details, plan_table
from dotmoe.inspection.sizes import Item, total
from dotmoe.inspection.table_style import table_of
from dotmoe.inspection.units import in_bytes, in_time


def render(inspection: Inspection, *, details: bool = False) -> RenderableType:
    """What would be made of the model, what it would cost, and what to know before.

    Args:
        inspection: What to show.
        details: Also the items that each size is the sum of.
    """
    parts: list[RenderableType] = [_model_and_split(inspection), _counts(inspection)]
    parts.append(_sizes(inspection, details))
    if details:
        parts.extend(_items(inspection))
    parts.append(_time_here(inspection))
    if inspection.plans:
        parts.append(plan_table(inspection.plans))
    if details or len(inspection.plans) == 1:
        parts.extend(plan_details(plan) for plan in inspection.plans)
    if inspection.warnings:
        parts.append(_warnings(inspection.warnings))
    return Group(*parts)


def _model_and_split(inspection: Inspection) -> RenderableType:
    split = inspection.granularity
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    grid.add_row(
        "model",
        f"{inspection.model_type}, {inspection.layers} layers, model width "
        f"{inspection.model_width:,}, FFN width {inspection.ffn_width:,}, vocabulary "
        f"{inspection.vocabulary:,}, context {inspection.context:,}, stored as "
        f"{inspection.stored_dtype}",
    )
    grid.add_row(
        "split",
        f"every layer {split.num_experts} experts of {split.expert_size} neurons; "
        f"{split.active_experts} run per token, {split.active_fraction:.1%} of the FFN neurons",
    )
    return Group(grid, "")


def _counts(inspection: Inspection) -> RenderableType:
    counts = inspection.counts
    table = table_of("parameters (exact)", "count", "of dense")
    for name, count in (
        ("dense model", counts.dense_total),
        ("stored, routers included", counts.stored),
        ("active per token", counts.active),
        ("  with routers", counts.active_with_routers),
        ("  without embeddings and head", counts.active_without_embeddings),
        ("outside the FFNs: always active", counts.floor),
        ("  attention and norms", counts.attention_and_norms),
        ("  input embedding", counts.input_embedding),
        ("  output head" if counts.output_head else "  output head (tied)", counts.output_head),
    ):
        table.add_row(name, f"{count:,}", f"{count / counts.dense_total:.1%}")
    return table


def _sizes(inspection: Inspection, details: bool) -> RenderableType:
    run = inspection.run
    held = f"weights in {run.bytes_per_weight} bytes each"
    table = table_of(f"memory and disk (estimated; {held})", "size")
    if run.calibration_tokens:
        table.add_row("start from data", in_bytes(total(inspection.calibration_memory)))
    if run.steps:
        tokens = f"{run.micro_batch_size} x {run.seq_len:,} tokens at once"
        table.add_row(f"alignment, {tokens}", in_bytes(total(inspection.memory)))
        less = in_bytes(total(inspection.memory_checkpointing))
        table.add_row("  with --activation-checkpointing", less)
    table.add_row("export and its verification", in_bytes(total(inspection.export_memory)))
    table.add_row("disk", in_bytes(total(inspection.disk)))
    table.add_row("  exported checkpoint", in_bytes(total(inspection.exported)))
    notes = [] if details else ["--details lists what each is the sum of."]
    if run.device == "cpu" and run.bytes_per_weight == 4:
        notes.append("--bytes-per-weight 2 is for a GPU.")
    return Group(table, Text(" " + " ".join(notes), style="dim"), "")


def _items(inspection: Inspection) -> list[RenderableType]:
    titled: list[tuple[str, tuple[Item, ...]]] = [
        ("memory of the start from data", inspection.calibration_memory),
        ("memory of the alignment", inspection.memory),
        ("memory of the alignment, checkpointing", inspection.memory_checkpointing),
        ("memory of the export", inspection.export_memory),
        ("disk", inspection.disk),
        ("exported checkpoint", inspection.exported),
    ]
    tables: list[RenderableType] = []
    for title, items in titled:
        table = table_of(title, "size")
        for item in items:
            table.add_row(item.name, in_bytes(item.amount))
        table.add_row("total", in_bytes(total(items)), style="bold")
        tables.append(table)
    return tables


def _time_here(inspection: Inspection) -> RenderableType:
    run, here = inspection.run, inspection.here
    work = f"alignment: {run.steps:,} steps of {run.batch_size} x {run.seq_len:,} tokens"
    again = f"{in_time(here.hours_checkpointing)} with checkpointing"
    return Text(
        f"{work}, {total(inspection.flops):.2e} FLOP\n"
        f"on {here.device}, {here.dtype} (estimated; measured {here.flops_per_s / 1e12:,.3g} "
        f"TFLOP/s, {here.bytes_per_s / 1e9:,.3g} GB/s): {in_time(here.hours)}, {again}\n"
    )


def _warnings(warnings: tuple[str, ...]) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    for warning in warnings:
        grid.add_row("warning:", warning, style="yellow")
    return grid
