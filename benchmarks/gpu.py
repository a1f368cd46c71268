"""Timings on one GPU at the shape of Qwen2.5-7B, random weights, 148 experts: results/gpu.json.

    python benchmarks/gpu.py                            # one GPU with 80 GB
    python benchmarks/gpu.py --parts finetune export
    python benchmarks/gpu.py --tiny --out OUT.json      # all of it at tiny size on the CPU

Each part is written as soon as it is measured, and replaces what the file has of it. Whether a GPU
computes what the CPU computes is tested by `pytest -m gpu`; serving is timed by
`throughput_by_granularity.py --preset qwen25_7b`.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import alignment_step
import finetune_step
from alignment_step import Subject
from dotmoe.cli.arguments import settings as settings_of
from dotmoe.common.files import read_json
from dotmoe.export.config import ExportConfig
from dotmoe.export.write import export
from dotmoe.method.config import RepairConfig
from dotmoe.method.repair import repair
from dotmoe.models.config import LoadConfig
from dotmoe.models.load import describe_dense, left_on_disk, load_dense
from dotmoe.text.blocks import TokenBlocks
from random_models import Shape, random_layout, random_tokens, write_random_dense
from rounds import keep

TINY = Subject(shape=Shape(64, 192, 2, 4, 2, 2_048, 256), experts=8, active=2, seq_len=32)
LAYERS = 4
"""Layers of finetuning, repair and export, whose times grow by layer; the alignment has all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What to measure."""

    parts: tuple[str, ...] = ("alignment", "finetune", "repair", "export")
    rounds: int = 5
    tiny: bool = False
    """Measure a tiny model on the CPU, to try this script."""
    out: Path = Path("results/gpu.json")


def main() -> None:
    settings = settings_of(Settings, __doc__)
    subject = TINY if settings.tiny else alignment_step.PRESETS["qwen25_7b"]
    for part in settings.parts:
        found = measured(part, subject, settings.rounds)
        before = read_json(settings.out) if settings.out.exists() else {}
        keep(settings.out, before | {part: found})
        print(part, {name: value for name, value in found.items() if isinstance(value, float)})


def measured(part: str, subject: Subject, rounds: int) -> dict[str, Any]:
    """Result of one part: `alignment`, `finetune`, or of a checkpoint, `repair` or `export`."""
    if part == "alignment":
        record = alignment_step.measured(subject, rounds, seed=0)
        return {**record["summary"], "peak_bytes": record["peak_bytes"]}
    subject = replace(subject, shape=replace(subject.shape, layers=LAYERS, vocabulary=8_192))
    if part == "finetune":
        step = finetune_step.Settings(
            shape=subject.shape,
            experts=subject.experts,
            tokens=subject.micro_batch * subject.seq_len,
            rounds=rounds,
            dtype=subject.dtype,
            device=subject.device,
        )
        return finetune_step.measured(step, [subject.active])
    with TemporaryDirectory() as scratch:
        return timed(part, subject, Path(scratch))


def timed(part: str, subject: Subject, scratch: Path) -> dict[str, Any]:
    """Seconds of a layer, and peak bytes on the device, of a repair or of an export."""
    shape, source, out = subject.shape, scratch / "dense", scratch / "out"
    layout = random_layout(shape, subject.experts, subject.active, seed=0)
    write_random_dense(shape, source, getattr(torch, subject.dtype), seed=0)
    on_cpu, started = subject.device == "cpu", time.monotonic()
    if not on_cpu:
        torch.cuda.reset_peak_memory_stats()
    found: dict[str, Any] = {}
    if part == "repair":
        dense = load_dense(str(source), LoadConfig(dtype="auto", device=subject.device))
        tokens = TokenBlocks(random_tokens(shape, 32, subject.seq_len, seed=1))
        asked = RepairConfig(repair_tokens=32 * subject.seq_len)
        found["tokens"] = repair(dense, (layout,), tokens, asked, seed=0, folder=out)["tokens"]
    else:
        described = describe_dense(str(source))
        dense = described if on_cpu else left_on_disk(described, LoadConfig(device=subject.device))
        text_BT = random_tokens(shape, 1, 2_048, seed=0).long()
        record = export(dense, (layout,), out, ExportConfig(), text_BT)
        found["verification"] = record.verification_in_short()
    seconds = time.monotonic() - started
    peak = None if on_cpu else torch.cuda.max_memory_allocated()
    return found | {"seconds_a_layer": seconds / shape.layers, "peak_bytes": peak}


if __name__ == "__main__":
    main()
