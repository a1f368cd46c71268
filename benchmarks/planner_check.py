"""Time and memory of an alignment step: predicted by `dotmoe inspect`, and measured.

    python benchmarks/planner_check.py                  # small shapes, one CPU thread, minutes
    python benchmarks/planner_check.py --predict-only   # the same measured steps, predicted anew

Every round measures this machine's matmul rate and copy rate, and then a step. The shares of these
rates that the estimate assumes on a CPU were chosen before the `unseen` shapes were measured.
Predicted and measured memory count only tensors.
"""

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro

from alignment_step import SMALL, Step, Subject
from dotmoe.files import read_json, write_json
from dotmoe.inspection.planner import ON_CPU
from random_models import Shape
from rounds import in_turns, keep, medians, rates


def subject(width: int, ffn: int, layers: int, vocabulary: int, **changes: Any) -> Subject:
    """The small subject with heads of width 64, these sizes and further changes."""
    heads = width // 64
    kv_heads = changes.pop("kv_heads", heads)
    return replace(SMALL, shape=Shape(width, ffn, layers, heads, kv_heads, vocabulary), **changes)


EMBEDDED = Shape(192, 768, 5, 6, 2, 2_048)
SUBJECTS = {
    "as the speed benchmark": replace(SMALL, micro_batches=2),
    "many tokens": replace(SMALL, micro_batch=8),
    "bfloat16 weights": replace(SMALL, micro_batch=8, dtype="bfloat16"),
    "the embedded model": replace(SMALL, shape=EMBEDDED, experts=48, active=12, micro_batch=4),
    "large vocabulary": subject(512, 1_536, 2, 32_768, kv_heads=4, experts=24, active=6),
    "wide FFN, few tokens": subject(512, 9_472, 2, 4_096, kv_heads=2, micro_batch=1),
    "wider model": subject(1_024, 3_584, 2, 8_192, kv_heads=4, experts=56, active=14),
    "deep and narrow": subject(256, 1_024, 8, 4_096, experts=32, active=8, micro_batch=4),
    "long sequences": subject(
        *(384, 1_536, 4, 4_096), experts=48, active=12, seq_len=1_024, micro_batch=1
    ),
    "many small experts": subject(512, 4_096, 3, 16_384, experts=256, active=64, micro_batches=2),
    "three sequences, coarse experts": subject(
        *(640, 2_560, 3, 12_288), kv_heads=2, experts=8, active=2, micro_batch=3
    ),
    "four micro-batches": replace(
        subject(384, 1_024, 4, 8_192, kv_heads=2, experts=16, active=4, seq_len=128),
        micro_batch=4,
        micro_batches=4,
    ),
    "narrow FFN": subject(768, 1_536, 3, 16_384, experts=64, active=16, seq_len=512, micro_batch=1),
}
"""Subjects by name; in each, a different part of time or memory dominates."""
UNSEEN = ("three sequences, coarse experts", "four micro-batches", "narrow FFN")
"""Subjects first measured after the shares were chosen; the others influenced the choice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What to measure."""

    rounds: int = 7
    subjects: tuple[str, ...] = tuple(SUBJECTS)
    out: Path = Path("results/planner_check.json")
    predict_only: bool = False
    """Keep the measurements in the file, and only predict them again."""
    seed: int = 0


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    torch.set_num_threads(1)
    earlier = read_json(settings.out) if settings.predict_only else {}
    rows = earlier.get("rows")
    if rows is None:
        rows = [row for name in settings.subjects for row in measured(name, settings)]
    for row in rows:
        shape = Shape(**row["subject"]["shape"])
        one = Subject(**{**row["subject"], "shape": shape})
        row |= one.predicted(row, checkpointing=row["checkpointing"])
        row["ratio"] = sum(row["predicted_s"].values()) / row["seconds"]["step"]
        again = ", checkpointing" if row["checkpointing"] else ""
        print(f"{row['name']}{again}: {row['ratio']:.2f} of time")
        if "measured_bytes" in row:  # older records have only times
            row["memory_ratio"] = row["predicted_bytes"] / row["measured_bytes"]
    worst = {
        f"{what}, {kind}": max(
            (abs(row[what] - 1) for row in rows if what in row and row["unseen"] == is_unseen),
            default=None,
        )
        for what in ("ratio", "memory_ratio")
        for kind, is_unseen in (("seen", False), ("unseen", True))
    }
    print(f"farthest from 1: {worst}")
    record = {"clock": "processor", "rounds": earlier.get("rounds", settings.rounds), "rows": rows}
    record |= {"efficiency": ON_CPU._asdict(), "worst_error": worst}
    if earlier:  # measurements keep their provenance
        write_json(settings.out, earlier | record)
    else:
        keep(settings.out, record, settings.seed)


def measured(name: str, settings: Settings) -> list[dict[str, Any]]:
    """Medians of the rates and of a step's parts, without and with checkpointing."""
    one = SUBJECTS[name]
    dense = one.dense(settings.seed)
    here, rows = partial(rates, dense.device, torch.float32), []
    step = Step(one, dense, seed=settings.seed)
    for checkpointing in (False, True):
        taken = partial(step.taken, checkpointing=checkpointing)
        found = in_turns({"rates": here, "step": taken}, settings.rounds)
        rows.append(
            {
                "name": name,
                "unseen": name in UNSEEN,
                "checkpointing": checkpointing,
                "subject": asdict(one),
                **medians(found["rates"]),
                "seconds": medians(found["step"]),
                "measured_bytes": step.peak_bytes(checkpointing=checkpointing),
            }
        )
    return rows


if __name__ == "__main__":
    main()
