"""What the rounds of `alignment_step.py` say together, as medians and ratios."""

from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from alignment_step_subject import Subject, run_size, sizes
from dotmoe.inspection.step_time import alignment_work
from dotmoe.models.dense import DenseModel

PARTS = (
    "teacher forward",
    "student forward",
    "backward",
    "assignment",
    "head and losses",
    "optimizer",
)


def summary(record: dict[str, Any], subject: Subject, dense: DenseModel) -> dict[str, Any]:
    """Medians over rounds of seconds and of the ratios within each round."""
    rounds = record["steps"]
    work = alignment_work(sizes(subject, dense), run_size(subject), checkpointing=False)
    unavoidable = sum(part.products + part.attention for part in work.values())
    rate = max(one["flops_per_s"] for one in rounds["matmul"])
    bounds = [unavoidable / one["flops_per_s"] for one in rounds["matmul"]]
    plain, again, dense_s = (
        [one["step"] for one in rounds[name]]
        for name in ("alignment", "alignment, checkpointing", "dense training")
    )
    parts = {name: median(one[name] for one in rounds["alignment"]) for name in PARTS}
    step_s = median(plain)
    return {
        "tokens": subject.tokens,
        "step_s": step_s,
        "tokens_per_s": subject.tokens / step_s,
        "parts_s": parts,
        "matmul_flops_per_s": rate,
        "unavoidable_flops": unavoidable,
        "share_of_lower_bound": median(b / s for b, s in zip(bounds, plain, strict=True)),
        "dense_training_step_s": median(dense_s),
        "ratio_to_dense_training": median(s / d for s, d in zip(plain, dense_s, strict=True)),
        "checkpointing_ratio": median(a / s for a, s in zip(again, plain, strict=True)),
        "assignment_share": median(o["assignment"] / o["step"] for o in rounds["alignment"]),
        "straight_through_share": record["straight_through_s"] / step_s,
    }


def show(record: dict[str, Any]) -> None:
    found, console = record["summary"], Console()
    table = Table("part", "s", "share", title=f"alignment step of {found['tokens']:,} tokens")
    for name, seconds in found["parts_s"].items():
        table.add_row(name, f"{seconds:.4f}", f"{seconds / found['step_s']:.1%}")
    table.add_row("step", f"{found['step_s']:.4f}", "")
    console.print(table)
    for name, value in found.items():
        if not isinstance(value, dict):
            console.print(f"{name}: {value:.4g}")
    console.print(f"peak bytes: {record['peak_bytes']}")
    for row in record["tokens"]:
        console.print({name: float(f"{value:.4g}") for name, value in row.items()})
