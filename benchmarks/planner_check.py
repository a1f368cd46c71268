"""Step times that `dotmoe inspect` predicts, beside steps that were measured.

    python benchmarks/planner_check.py                  # small shapes, one CPU thread, minutes
    python benchmarks/planner_check.py --predict-only   # the same measured steps, predicted anew

Every round measures this machine's matmul rate and copy rate, and then a step. The shares of these
rates that the estimate assumes on a CPU were chosen before the `unseen` shapes were measured.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import tyro
from rich.console import Console

from alignment_step_subject import Clock, Step, Subject, random_dense, run_size, sizes
from dotmoe.files import write_json
from dotmoe.inspection.step_time import ON_CPU, Accelerator, alignment_work
from dotmoe.provenance import provenance
from random_models import Shape

_FIRST = Subject(
    shape=Shape(width=512, ffn_width=2_368, layers=3, heads=8, kv_heads=2, vocabulary=8_192),
    experts=148,
    active=37,
    seq_len=256,
    micro_batch=2,
    micro_batches=2,
    dtype="float32",
    device="cpu",
)


SUBJECTS = {
    "as the speed benchmark": _FIRST,
    "the embedded model": replace(
        _FIRST,
        shape=Shape(width=192, ffn_width=768, layers=5, heads=6, kv_heads=2, vocabulary=2_048),
        experts=48,
        active=12,
        micro_batch=4,
        micro_batches=1,
    ),
    "large vocabulary": replace(
        _FIRST,
        shape=Shape(width=512, ffn_width=1_536, layers=2, heads=8, kv_heads=4, vocabulary=32_768),
        experts=24,
        active=6,
        micro_batches=1,
    ),
    "wide FFN, few tokens": replace(
        _FIRST,
        shape=Shape(width=512, ffn_width=9_472, layers=2, heads=8, kv_heads=2, vocabulary=4_096),
        micro_batch=1,
        micro_batches=1,
    ),
    "wider model": replace(
        _FIRST,
        shape=Shape(width=1_024, ffn_width=3_584, layers=2, heads=16, kv_heads=4, vocabulary=8_192),
        experts=56,
        active=14,
        micro_batches=1,
    ),
    "deep and narrow": replace(
        _FIRST,
        shape=Shape(width=256, ffn_width=1_024, layers=8, heads=8, kv_heads=4, vocabulary=4_096),
        experts=32,
        active=8,
        micro_batch=4,
        micro_batches=1,
    ),
    "long sequences": replace(
        _FIRST,
        shape=Shape(width=384, ffn_width=1_536, layers=4, heads=6, kv_heads=6, vocabulary=4_096),
        experts=48,
        active=12,
        seq_len=1_024,
        micro_batch=1,
        micro_batches=1,
    ),
    "many small experts": replace(
        _FIRST,
        shape=Shape(width=512, ffn_width=4_096, layers=3, heads=8, kv_heads=8, vocabulary=16_384),
        experts=256,
        active=64,
    ),
    "three sequences, coarse experts": replace(
        _FIRST,
        shape=Shape(width=640, ffn_width=2_560, layers=3, heads=10, kv_heads=2, vocabulary=12_288),
        experts=8,
        active=2,
        micro_batch=3,
        micro_batches=1,
    ),
    "four micro-batches": replace(
        _FIRST,
        shape=Shape(width=384, ffn_width=1_024, layers=4, heads=6, kv_heads=2, vocabulary=8_192),
        experts=16,
        active=4,
        seq_len=128,
        micro_batch=4,
        micro_batches=4,
    ),
    "narrow FFN": replace(
        _FIRST,
        shape=Shape(width=768, ffn_width=1_536, layers=3, heads=12, kv_heads=12, vocabulary=16_384),
        experts=64,
        active=16,
        seq_len=512,
        micro_batch=1,
        micro_batches=1,
    ),
}
UNSEEN = ("three sequences, coarse experts", "four micro-batches", "narrow FFN")
"""Measured for the first time after the shares had been chosen; the others had been looked at."""
COPIED_BYTES = 1 << 26


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What to measure."""

    rounds: int = 7
    out: Path = Path("results/planner_check.json")
    predict_only: bool = False
    """Keep the measured seconds of the file, and predict them again."""
    seed: int = 0


def main() -> None:
    settings = tyro.cli(Settings)
    torch.set_num_threads(1)
    if settings.predict_only:
        record = json.loads(settings.out.read_text(encoding="utf-8"))
    else:
        rows = []
        for name, subject in SUBJECTS.items():
            rows += measured(name, subject, settings)
        record = {"origin": "measured", "clock": "processor", "rounds": settings.rounds}
        record |= {"rows": rows, "provenance": provenance(settings.seed)}
    for row in record["rows"]:
        row["predicted_s"] = predicted(row)
        row["ratio"] = sum(row["predicted_s"].values()) / row["seconds"]["step"]
        again = ", checkpointing" if row["checkpointing"] else ""
        Console().print(f"{row['name']}{again}: predicted / measured {row['ratio']:.2f}")
    record["efficiency"] = asdict(ON_CPU)
    record["worst_error"] = {
        kind: max(
            (abs(row["ratio"] - 1) for row in record["rows"] if row["unseen"] == unseen),
            default=None,
        )
        for kind, unseen in (("seen", False), ("unseen", True))
    }
    Console().print(record["worst_error"])
    write_json(settings.out, record)


def measured(name: str, subject: Subject, settings: Settings) -> list[dict[str, Any]]:
    """Medians of rates and of a step's parts, without and with activation checkpointing."""
    dense = random_dense(subject, settings.seed)
    rows = []
    for checkpointing in (False, True):
        step = Step(subject, dense, seed=settings.seed, checkpointing=checkpointing)
        parts, products, copies = [], [], []
        with step.ready():
            for one in range(settings.rounds + 1):
                rates = matmul_rate(), copy_rate()
                found = step.take()
                if one:
                    parts.append(found)
                    products.append(rates[0])
                    copies.append(rates[1])
        rows.append(
            {
                "name": name,
                "unseen": name in UNSEEN,
                "checkpointing": checkpointing,
                "subject": asdict(subject),
                "matmul_flops_per_s": median(products),
                "copy_bytes_per_s": median(copies),
                "seconds": {part: median(one[part] for one in parts) for part in parts[0]},
            }
        )
    return rows


def predicted(row: dict[str, Any]) -> dict[str, float]:
    """Seconds of each part, from the shape and the rates measured beside it."""
    said = row["subject"]
    subject = Subject(**{**said, "shape": Shape(**said["shape"])})
    # On the meta device: only the config and the shapes are read.
    found = sizes(subject, random_dense(replace(subject, device="meta"), seed=0))
    here = Accelerator(
        name="this CPU",
        flops_per_s=row["matmul_flops_per_s"],
        bytes_per_s=row["copy_bytes_per_s"],
        efficiency=ON_CPU,
    )
    parts = alignment_work(found, run_size(subject), checkpointing=row["checkpointing"])
    return {part: here.seconds(work) for part, work in parts.items()}


def matmul_rate() -> float:
    """Best of four square products, FLOP a processor second."""
    matrix = torch.linspace(-1, 1, 512 * 512).view(512, 512)
    return max(2 * 512**3 / taken(lambda: matrix @ matrix) for _ in range(4))


def copy_rate() -> float:
    """Best of three copies far larger than the caches; bytes read and written a second."""
    source = torch.zeros(COPIED_BYTES // 4)
    target = torch.empty_like(source)
    return max(2 * COPIED_BYTES / taken(lambda: target.copy_(source)) for _ in range(3))


def taken(work: Callable[[], object]) -> float:
    clock = Clock(torch.device("cpu"))
    with clock.part("work"):
        work()
    return clock.seconds()["work"]


if __name__ == "__main__":
    main()
