"""What a conversion would give and cost, before anything is downloaded, allocated or paid."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dotmoe.granularity import ExpertsConfig, Granularity, resolve
from dotmoe.inspection.costs import (
    PAPER_TOKENS,
    Item,
    RunSize,
    Sizes,
    alignment_flops,
    alignment_memory,
    calibration_memory,
    disk,
    export_memory,
    exported_bytes,
    sizes_of,
    total,
)
from dotmoe.inspection.device_time import (
    UTILISATION,
    MatmulRate,
    PlannedTime,
    measure_matmul_rate,
    planned_times,
)
from dotmoe.models.family import Family
from dotmoe.parameters import ParameterCounts, count_parameters

FUSED_ROUTING_LIMIT = 32
"""Active experts that fused routing kernels of servers handle."""
LARGEST_STOCK_EXPERTS = 512
"""Experts a layer of the widest stock MoE models."""
_ITEMISED = (
    "calibration_memory",
    "memory",
    "memory_checkpointing",
    "export_memory",
    "disk",
    "flops",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """Everything that `dotmoe inspect` shows; each list of items adds up to the total shown."""

    model_type: str
    layers: int
    model_width: int
    ffn_width: int
    vocabulary: int
    context: int
    granularity: Granularity
    """The same for every layer."""
    counts: ParameterCounts
    run: RunSize
    memory: tuple[Item, ...]
    """Alignment, bytes, without activation checkpointing."""
    memory_checkpointing: tuple[Item, ...]
    """Alignment, bytes, with activation checkpointing."""
    calibration_memory: tuple[Item, ...]
    """Start from data, bytes; before alignment, not on top of it."""
    export_memory: tuple[Item, ...]
    """Export and its verification, bytes."""
    disk: tuple[Item, ...]
    """Bytes."""
    flops: tuple[Item, ...]
    """Alignment, floating-point operations, without checkpointing."""
    times: tuple[PlannedTime, ...]
    """This machine first, then the planning table."""
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types, with the totals."""
        record = dataclasses.asdict(self)
        record["origin"] = "estimated"
        record["active_neuron_fraction"] = self.granularity.active_fraction
        record["active_parameter_fraction"] = self.counts.active_fraction
        record["utilisation"] = UTILISATION
        for name in _ITEMISED:
            record[f"{name}_total"] = total(getattr(self, name))
        return record


def inspect_model(
    config: Any,
    family: Family,
    experts: ExpertsConfig,
    run: RunSize,
    rate: MatmulRate | None = None,
) -> Inspection:
    """Sizes, costs and warnings of converting one model.

    Args:
        config: Hugging Face config of the dense model.
        family: Its family.
        experts: Split that is wanted.
        run: Alignment run that is wanted.
        rate: Speed of this machine; None measures it (0.3 s).

    Raises:
        UserError: The split does not fit the FFN width, or the device is not there.
    """
    split = resolve(experts, config.intermediate_size)
    counts = count_parameters(config, family, split)
    sizes = sizes_of(config, family.attention(config), split, counts)
    memory = alignment_memory(sizes, run, checkpointing=False)
    memory_checkpointing = alignment_memory(sizes, run, checkpointing=True)
    flops = alignment_flops(sizes, run)
    rate = measure_matmul_rate(run) if rate is None else rate
    return Inspection(
        model_type=config.model_type,
        layers=sizes.widths.layers,
        model_width=sizes.widths.model,
        ffn_width=sizes.widths.ffn,
        vocabulary=sizes.widths.vocabulary,
        context=sizes.widths.context,
        granularity=split,
        counts=counts,
        run=run,
        memory=memory,
        memory_checkpointing=memory_checkpointing,
        calibration_memory=calibration_memory(sizes, run),
        export_memory=export_memory(sizes, run),
        disk=disk(sizes, run),
        flops=flops,
        times=planned_times(flops, rate, total(memory), total(memory_checkpointing)),
        warnings=tuple(_split_warnings(split) + _model_warnings(sizes, run)),
    )


def _split_warnings(split: Granularity) -> list[str]:
    warnings = []
    size, experts, active = split.expert_size, split.num_experts, split.active_experts
    if active > FUSED_ROUTING_LIMIT:
        warnings.append(
            f"{active} experts run per token; fused routing kernels of some servers take at most "
            f"{FUSED_ROUTING_LIMIT} and fall back to slower ones. Larger experts need fewer."
        )
    if size % 32:
        warnings.append(
            f"Experts have {size} neurons, not a multiple of 32: llama.cpp cannot quantise their "
            "down_proj, and GPU kernels pad or slow down. Multiples of 64 are best."
        )
    elif size % 64:
        warnings.append(
            f"Experts have {size} neurons, not a multiple of 64: GPU kernels pad or slow down."
        )
    if experts > LARGEST_STOCK_EXPERTS:
        warnings.append(
            f"A layer has {experts} experts; stock MoE models stop at {LARGEST_STOCK_EXPERTS}, and "
            "servers' kernels are untried beyond. Larger experts make fewer."
        )
    return warnings


def _model_warnings(sizes: Sizes, run: RunSize) -> list[str]:
    warnings = []
    if sizes.counts.output_head == 0:
        extra = next(i.amount for i in exported_bytes(sizes) if i.name == "tied head written out")
        warnings.append(
            "The output head is tied to the embedding; servers of the exported format do not tie, "
            f"so it is written out: {in_bytes(extra)} more."
        )
    window = sizes.traits.sliding_window
    if window is not None and window < sizes.widths.context:
        warnings.append(
            f"Attention slides over {window:,} tokens, which the exported format cannot: its "
            f"context is lowered from {sizes.widths.context:,} to {window:,}, exact up to there."
        )
    if run.tokens < PAPER_TOKENS:
        warnings.append(
            f"The run sees {run.tokens:,} tokens; the paper's alignment saw {PAPER_TOKENS:,} "
            "(3,500 steps of 64 x 2,048). Expect to lose more quality than it reports."
        )
    return warnings


def in_bytes(amount: int) -> str:
    """A size as people read it, in binary units.

    Example:
        >>> in_bytes(3 * 2**30)
        '3.00 GiB'
    """
    value = float(amount)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1_024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1_024
    return f"{value:.2f} TiB"


def render(inspection: Inspection) -> RenderableType:
    """The inspection as tables for a terminal."""
    parts: list[RenderableType] = [_split_table(inspection), _counts_table(inspection.counts)]
    parts.append(_memory_table(inspection))
    for title, items in (
        ("Memory of the start from data, estimated", inspection.calibration_memory),
        ("Memory of the export, estimated", inspection.export_memory),
        ("Disk, estimated", inspection.disk),
    ):
        parts.append(_items_table(title, items))
    parts.append(_time_table(inspection))
    parts.extend(Text(f"warning: {warning}", style="yellow") for warning in inspection.warnings)
    return Group(*parts)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=any(columns))
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    return table


def _split_table(inspection: Inspection) -> Table:
    split = inspection.granularity
    table = _table("Split, the same in every layer", "", "")
    table.add_row("model type", inspection.model_type)
    table.add_row("layers", f"{inspection.layers}")
    table.add_row("model width", f"{inspection.model_width:,}")
    table.add_row("FFN width", f"{inspection.ffn_width:,}")
    table.add_row("vocabulary", f"{inspection.vocabulary:,}")
    table.add_row("experts (E)", f"{split.num_experts}")
    table.add_row("neurons of an expert (s)", f"{split.expert_size}")
    table.add_row("active experts (k)", f"{split.active_experts}")
    table.add_row("active share of FFN neurons", f"{split.active_fraction:.1%}")
    return table


def _counts_table(counts: ParameterCounts) -> Table:
    table = _table("Parameters, exact", "", "count", "of dense")
    for name, count in (
        ("dense model", counts.dense_total),
        ("stored, with routers", counts.stored),
        ("active", counts.active),
        ("active with routers", counts.active_with_routers),
        ("active without embeddings", counts.active_without_embeddings),
        ("floor: conversion cannot remove", counts.floor),
        ("  attention and norms", counts.attention_and_norms),
        ("  input embedding", counts.input_embedding),
        ("  output head (0: tied)", counts.output_head),
    ):
        table.add_row(name, f"{count:,}", f"{count / counts.dense_total:.1%}")
    return table


def _memory_table(inspection: Inspection) -> Table:
    run = inspection.run
    title = f"Memory of alignment, estimated, {run.micro_batch_tokens:,} tokens at once"
    table = _table(title, "", "plain", "checkpointing")
    pairs = zip(inspection.memory, inspection.memory_checkpointing, strict=True)
    for plain, checkpointing in pairs:
        table.add_row(plain.name, in_bytes(plain.amount), in_bytes(checkpointing.amount))
    table.add_section()
    table.add_row(
        "total",
        in_bytes(total(inspection.memory)),
        in_bytes(total(inspection.memory_checkpointing)),
    )
    return table


def _items_table(title: str, items: tuple[Item, ...]) -> Table:
    table = _table(title, "", "size")
    for item in items:
        table.add_row(item.name, in_bytes(item.amount))
    table.add_section()
    table.add_row("total", in_bytes(total(items)))
    return table


def _time_table(inspection: Inspection) -> Table:
    title = (
        f"{total(inspection.flops):.2e} FLOPs for {inspection.run.tokens:,} tokens, "
        f"one device, assumed at {UTILISATION:.0%} of its rate"
    )
    table = _table(title, "device", "TFLOP/s", "rate is", "hours", "checkpointing", "fits")
    for row in inspection.times:
        table.add_row(
            row.device,
            f"{row.flops_per_s / 1e12:,.3g}",
            row.origin,
            f"{row.hours:,.3g}",
            f"{row.hours_checkpointing:,.3g}",
            row.fits or "",
        )
    return table
