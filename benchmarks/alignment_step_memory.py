"""Peak memory that `dotmoe inspect` predicts for an alignment step, beside what is measured.

    python benchmarks/alignment_step_memory.py                   # small shapes, CPU, a minute
    python benchmarks/alignment_step_memory.py --device cuda     # the same on a GPU

Measured is what PyTorch's allocator handed out; of memory besides tensors neither figure speaks.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.console import Console

from alignment_step_subject import Step, Subject, peak_bytes, random_dense, run_size, sizes
from dotmoe.files import write_json
from dotmoe.inspection.memory import alignment_memory
from dotmoe.provenance import provenance
from random_models import Shape

_BALANCED = Subject(
    shape=Shape(width=512, ffn_width=2_368, layers=3, heads=8, kv_heads=2, vocabulary=8_192),
    experts=148,
    active=37,
    seq_len=256,
    micro_batch=2,
    micro_batches=1,
    dtype="float32",
    device="cpu",
)
SUBJECTS = {
    "as the speed benchmark": _BALANCED,
    "many tokens": replace(_BALANCED, micro_batch=8),
    "bfloat16 weights": replace(_BALANCED, micro_batch=8, dtype="bfloat16"),
    "deep": replace(_BALANCED, shape=replace(_BALANCED.shape, layers=8, width=256)),
    "large vocabulary": replace(_BALANCED, shape=replace(_BALANCED.shape, vocabulary=65_536)),
    "wide FFN, few tokens": replace(
        _BALANCED, shape=replace(_BALANCED.shape, ffn_width=9_472), micro_batch=1
    ),
    "the embedded model": replace(
        _BALANCED,
        shape=Shape(width=192, ffn_width=768, layers=5, heads=6, kv_heads=2, vocabulary=2_048),
        experts=48,
        active=12,
        micro_batch=4,
    ),
}
"""Each lets another part of the memory dominate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What to measure."""

    device: Literal["cpu", "cuda"] = "cpu"
    out: Path = Path("results/memory_model.json")
    seed: int = 0


def main() -> None:
    settings = tyro.cli(Settings)
    torch.set_num_threads(1)
    rows = []
    for name, subject in SUBJECTS.items():
        for checkpointing in (False, True):
            here = replace(subject, device=settings.device)
            row = compared(here, settings.seed, checkpointing=checkpointing)
            rows.append({"name": name, "checkpointing": checkpointing, **row})
            Console().print(f"{name}, checkpointing {checkpointing}: {row['ratio']:.3f}")
    worst = max(abs(row["ratio"] - 1) for row in rows)
    Console().print(f"predicted / measured is at most {worst:.1%} from 1")
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    record = {"origin": "measured", "worst_error": worst, "rows": rows}
    write_json(settings.out, record | {"provenance": provenance(settings.seed)})


def compared(subject: Subject, seed: int, *, checkpointing: bool) -> dict[str, Any]:
    """Prediction with its items, measurement and their ratio; the second step is measured."""
    dense = random_dense(subject, seed)
    step = Step(subject, dense, seed=seed, checkpointing=checkpointing)
    with step.ready():
        step.take()
        measured = peak_bytes(step)
    items = alignment_memory(sizes(subject, dense), run_size(subject), checkpointing=checkpointing)
    return {
        "subject": asdict(subject),
        "predicted_bytes": sum(items.values()),
        "measured_bytes": measured,
        "ratio": sum(items.values()) / measured,
        "items": dict(items),
    }


if __name__ == "__main__":
    main()
