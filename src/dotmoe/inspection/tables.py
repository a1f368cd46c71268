"""An inspection as tables for a terminal of 80 columns or more."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from dotmoe.inspection.planner import Choice, Plan
from dotmoe.inspection.sizes import Items
from dotmoe.inspection.step_time import ON_GPU
from dotmoe.tables import Table, in_bytes, in_time, table_of, to_rich

if TYPE_CHECKING:
    from dotmoe.inspection import Inspection


def render(inspection: "Inspection", *, details: bool = False) -> RenderableType:
    """What would be made of the model, what it would cost, and what to know before.

    Args:
        inspection: What to show.
        details: Also the items that each size is the sum of.
    """
    parts: list[RenderableType] = [_model_and_split(inspection), to_rich(_counts(inspection))]
    parts.append(to_rich(_sizes(inspection, details)))
    if details:
        parts += [to_rich(items_table(t, items)) for t, items in inspection.itemised.items()]
    parts.append(Text(_time_here(inspection)))
    if inspection.plans:
        parts.append(to_rich(plan_table(inspection.plans)))
    if details or len(inspection.plans) == 1:
        parts += [to_rich(table) for plan in inspection.plans for table in plan_details(plan)]
    warnings = Grid.grid(padding=(0, 1))
    for warning in inspection.warnings:
        warnings.add_row(Text("warning:"), Text(warning), style="yellow")
    return Group(*parts, warnings)


def plan_table(plans: tuple[Plan, ...]) -> Table:
    """What is recommended on each machine, how fast that is and how long it takes."""
    first = plans[0]
    what = "alignment" if first.task == "align" else "fine-tuning"
    return Table(
        title=f"{what} of {first.tokens:,} tokens on GPUs, weights in 2 bytes each (estimated from "
        f"{first.origin} figures, of which shares are {ON_GPU.origin})",
        columns=("GPUs", "weights", "at once", "memory", "tokens/s", "time", "GPU h"),
        rows=[[machine(plan), *_plan_cells(plan)] for plan in plans],
    )


def plan_details(plan: Plan) -> list[Table]:
    """All ways to run on one machine, and where memory and time of the recommended one go."""
    fits = {True: "yes", False: "no"}
    said = {id(choice): fits[choice.fits] for choice in plan.choices}
    if plan.choice is not None:
        said[id(plan.choice)] = "recommended"
    shown = plan.choice or plan.choices[-1]
    steps = {**shown.parts, "step": shown.step_s}
    waits = {f"of all communication, {part}": s for part, s in shown.communication.items()}
    return [
        table_of(
            plan.choices,
            {
                f"{machine(plan)}: ways": lambda choice: choice.way,
                **_CHOICE,
                "fits": lambda choice: said[id(choice)],
            },
        ),
        items_table(f"memory of a GPU, {shown.way}", shown.memory),
        table_of(
            {**steps, **waits}.items(),
            {
                "a step, part by part": lambda row: row[0],
                "seconds": lambda row: f"{row[1]:.4f}",
                "share": lambda row: f"{row[1] / shown.step_s:.1%}" if row[0] in steps else "",
            },
        ),
    ]


_CHOICE: dict[str, Callable[[Choice], str]] = {
    "at once": lambda choice: str(choice.micro_batch_size),
    "memory": lambda choice: in_bytes(sum(choice.memory.values())),
    "tokens/s": lambda choice: f"{choice.tokens_per_s:,.0f}",
}


def machine(plan: Plan) -> str:
    """`8 x H100`, or `2 x 8 x H100` on two nodes."""
    name = f"{plan.gpus} x {plan.gpu.split()[0]}"
    return name if plan.nodes == 1 else f"{plan.nodes} x {name}"


def _plan_cells(plan: Plan) -> list[str]:
    choice: Choice | None = plan.choice
    if choice is None:
        needed = plan.gpus_needed
        return ["does not fit" if needed is None else f"needs {needed} GPUs", *[""] * 5]
    shown = [show(choice) for show in _CHOICE.values()]
    return [choice.way, *shown, in_time(plan.hours or 0), f"{plan.gpu_hours or 0:,.0f}"]


def items_table(title: str, items: Items) -> Table:
    """Sizes by item, and their sum."""
    rows = {**items, "total": sum(items.values())}
    columns = {title: lambda row: row[0], "size": lambda row: in_bytes(row[1])}
    return table_of(rows.items(), columns)


def _model_and_split(inspection: "Inspection") -> RenderableType:
    split, layers = inspection.granularity, inspection.layers
    first = split.first_dense_layers
    which = f"layers {first} to {layers - 1}: " if first else "every layer "
    grid = Grid.grid(padding=(0, 2))
    grid.add_row(
        Text("model", style="bold"),
        f"{inspection.model_type}, {layers} layers, model width {inspection.model_width:,}, FFN "
        f"width {inspection.ffn_width:,}, vocabulary {inspection.vocabulary:,}, context "
        f"{inspection.context:,}, stored as {inspection.stored_dtype}",
    )
    grid.add_row(
        Text("split", style="bold"),
        f"{which}{split.num_experts} experts of {split.expert_size} neurons; "
        f"{split.active_experts} run per token, {split.active_fraction:.1%} of the FFN neurons",
    )
    return Group(grid, "")


def _counts(inspection: "Inspection") -> Table:
    counts = inspection.counts
    rows = {
        "dense model": counts.dense_total,
        "dense model and routers": counts.stored,
        "active per token": counts.active,
        "  with routers": counts.active_with_routers,
        "  without embeddings and head": counts.active_without_embeddings,
        "outside the FFNs: always active": counts.floor,
        "  attention and norms": counts.attention_and_norms,
        "  input embedding": counts.input_embedding,
        "  output head" + " (tied)" * (counts.output_head == 0): counts.output_head,
    }
    return table_of(
        rows.items(),
        {
            "parameters (exact)": lambda row: row[0],
            "count": lambda row: f"{row[1]:,}",
            "of dense": lambda row: f"{row[1] / counts.dense_total:.1%}",
        },
    )


def _sizes(inspection: "Inspection", details: bool) -> Table:
    run = inspection.run
    shown = {}
    if run.calibration_tokens:
        shown["start from data"] = inspection.calibration_memory
    if run.steps:
        tokens = f"{run.micro_batch_size} x {run.seq_len:,} tokens at once"
        shown[f"alignment, {tokens}"] = inspection.memory
        shown["  with --activation-checkpointing"] = inspection.memory_checkpointing
    shown["export and its verification"] = inspection.export_memory
    shown["disk"] = inspection.disk
    shown["  exported checkpoint"] = inspection.exported
    held = f"weights in {run.bytes_per_weight} bytes each"
    notes = [] if details else ["--details lists what each is the sum of."]
    if run.device == "cpu" and run.bytes_per_weight == 4:
        notes.append("--bytes-per-weight 2 is for a GPU.")
    return table_of(
        shown.items(),
        {
            f"memory and disk (estimated; {held})": lambda row: row[0],
            "size": lambda row: in_bytes(sum(row[1].values())),
        },
        note=" ".join(notes),
    )


def _time_here(inspection: "Inspection") -> str:
    run, here = inspection.run, inspection.here
    return (
        f"alignment: {run.steps:,} steps of {run.batch_size} x {run.seq_len:,} tokens, "
        f"{inspection.flops:.2e} FLOP\n"
        f"on {here.device}, {here.dtype} (estimated; measured {here.flops_per_s / 1e12:,.3g} "
        f"TFLOP/s, {here.bytes_per_s / 1e9:,.3g} GB/s): {in_time(here.hours)}, "
        f"{in_time(here.hours_checkpointing)} with checkpointing\n"
    )
