"""Tables of docs/guides/hardware.md."""

from collections.abc import Mapping
from typing import Any

from document_tables.cells import about, tabled
from document_tables.paper_models import MODELS, on_one_gpu, planned
from document_tables.records import load
from document_tables.registry import part
from dotmoe.common.tables import in_about, in_bytes

SIMULATED = {"assignment": "align", "experts": "finetune", "repair": "repair"}


@part
def one_gpu_by_stage() -> str:
    """Estimates for three models on one H100, by stage."""
    rows = [{"model": model, **row} for model in MODELS for row in on_one_gpu(model)]
    columns = {
        "model": lambda row: row["model"],
        "conversion": lambda row: row["what"],
        "GPU memory": lambda row: in_about(row["memory"]),
        "experts": lambda row: about(_experts_hours(row["took"])),
        "repair": lambda row: about(row["took"]["repair"]) if "repair" in row["took"] else None,
        "all": lambda row: about(sum(row["took"].values())),
    }
    return tabled(rows, columns, words=2)


def _experts_hours(took: Mapping[str, float]) -> float:
    return took.get("start from data", 0.0) + took.get("alignment", 0.0)


@part
def simulated_memory() -> str:
    """Simulated peaks of the project's own steps at full width."""
    rows = [row for row in load("results/simulated_memory.json").rows if row.simulated]

    def together(row: Any) -> str:
        recomputed = ", recomputed" if row.checkpointing else ""
        return f"{row.micro_batch_size} x {row.seq_len}{recomputed}"

    columns = {
        "model": lambda row: row.model,
        "task": lambda row: SIMULATED[row.train],
        "GPUs": lambda row: row.ranks,
        "sequences at once": together,
        "peak of a GPU": lambda row: in_bytes(row.simulated),
        "planned": lambda row: in_bytes(row.planned),
        "on the host, per GPU": lambda row: in_bytes(row.on_host) if row.on_host else "nothing",
    }
    return tabled(rows, columns, words=2)


@part
def papers_plans() -> str:
    """Estimates of the paper's recipes on its machine."""
    columns = {
        "model": lambda row: row["model"],
        "task": lambda row: row["task"],
        "weights": lambda row: row["way"],
        "sequences at once": lambda row: row["micro_batch_size"],
        "memory of a GPU": lambda row: in_about(row["memory_total"]),
        "tokens/s": lambda row: f"{row['tokens_per_s']:,.0f}",
        "hours": lambda row: f"{row['hours']:.1f}",
    }
    return tabled(planned(), columns, words=3)


@part
def planner_error() -> str:
    """How near the cost model is to the steps that it was fitted to."""
    record = load("results/planner_check.json")
    ratios, shapes = [row.ratio for row in record.rows], {row.name for row in record.rows}
    return (
        f"Predicted by measured time: {min(ratios):.2f} to {max(ratios):.2f}, over {len(ratios)} "
        f"alignment steps of {len(shapes)} shapes in float32 ([planner_check]"
        "(../../results/planner_check.json))."
    )
