"""Plans as tables: one line a machine, and in full."""

from rich.console import Group, RenderableType
from rich.text import Text

from dotmoe.inspection.planner import Choice, Plan
from dotmoe.inspection.sizes import total
from dotmoe.inspection.step_time import ON_GPU
from dotmoe.inspection.table_style import table_of
from dotmoe.inspection.units import in_bytes, in_time


def plan_table(plans: tuple[Plan, ...]) -> RenderableType:
    """What is recommended on each machine, how fast that is and how long it takes."""
    first = plans[0]
    what = "alignment" if first.task == "align" else "fine-tuning"
    heading = Text(
        f"{what} of {first.tokens:,} tokens on GPUs, weights in 2 bytes each (estimated from "
        f"{first.origin} figures, of which shares are {ON_GPU.origin})"
    )
    table = table_of("GPUs", "weights", "at once", "memory", "tokens/s", "time", "GPU h")
    table.columns[0].no_wrap = True
    for plan in plans:
        choice = plan.choice
        if choice is None:
            table.add_row(machine(plan), too_small(plan), "", "", "", "", "")
            continue
        table.add_row(
            machine(plan),
            way(choice),
            str(choice.micro_batch_size),
            in_bytes(total(choice.memory)),
            f"{choice.tokens_per_s:,.0f}",
            in_time(plan.hours or 0),
            f"{plan.gpu_hours or 0:,.0f}",
        )
    return Group(heading, table)


def plan_details(plan: Plan) -> RenderableType:
    """All ways to run on one machine, and where memory and time of the recommended one go."""
    ways = table_of(f"{machine(plan)}: ways", "at once", "memory", "tokens/s", "fits")
    for index, choice in enumerate(plan.choices):
        fits = "recommended" if index == plan.recommended else "yes" if choice.fits else "no"
        ways.add_row(
            way(choice),
            str(choice.micro_batch_size),
            in_bytes(total(choice.memory)),
            f"{choice.tokens_per_s:,.0f}",
            fits,
        )
    shown = plan.choice or plan.choices[-1]
    memory = table_of(f"memory of a GPU, {way(shown)}", "size")
    for item in shown.memory:
        memory.add_row(item.name, in_bytes(item.amount))
    parts = table_of("a step, part by part", "seconds", "share")
    for part in shown.parts:
        parts.add_row(part.part, f"{part.seconds:.4f}", f"{part.seconds / shown.step_s:.1%}")
    parts.add_row("step", f"{shown.step_s:.4f}", "", style="bold")
    for part in shown.communication:
        parts.add_row(f"of all communication, {part.part}", f"{part.seconds:.4f}", "")
    return Group(ways, memory, parts)


def machine(plan: Plan) -> str:
    """`8 x H100`, or `2 x 8 x H100` on two nodes."""
    name = f"{plan.gpus} x {plan.gpu.split()[0]}"
    return name if plan.nodes == 1 else f"{plan.nodes} x {name}"


def way(choice: Choice) -> str:
    """How a choice divides memory, in two words."""
    return ("sharded" if choice.sharded else "whole") + (", ckpt" if choice.checkpointing else "")


def too_small(plan: Plan) -> str:
    """What a plan says where nothing fits."""
    if plan.gpus_needed is None:
        return "does not fit"
    return f"needs {plan.gpus_needed} GPUs"
