"""Decode throughput against batch size for several expert counts at equal active neurons.

    python benchmarks/throughput_by_granularity.py                       # a small model, CPU
    python benchmarks/throughput_by_granularity.py --preset qwen25_7b    # 7B widths, one GPU

The paper's figure (fig:throughput) has E = 8, 16, 74 and 148 with a quarter of the FFN active, in
vLLM; this one runs in stock Transformers, with the dense model beside. Models are random, since
speed does not depend on what they have learned.
"""

import shutil
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from dotmoe.bench import BenchConfig
from dotmoe.granularity import ExpertsConfig, resolve
from dotmoe.load import LoadConfig
from random_models import QWEN25_7B, Shape, random_layout, write_export, write_random_dense
from rounds import keep, require_device
from serving_speed import TEXT_TOKENS, measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A model shape and where it runs."""

    shape: Shape
    dtype: Literal["float32", "bfloat16"]
    device: str
    batch_sizes: tuple[int, ...]


PRESETS = {
    "cpu": Preset(
        shape=Shape(width=512, ffn_width=4_736, layers=2, heads=8, kv_heads=8),
        dtype="float32",
        device="cpu",
        batch_sizes=(1, 2, 4, 8, 16, 32),
    ),
    "qwen25_7b": Preset(
        shape=QWEN25_7B,
        dtype="bfloat16",
        device="cuda",
        batch_sizes=(1, 2, 4, 8, 16, 32, 64, 128),
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What to measure."""

    preset: Literal["cpu", "qwen25_7b"] = "cpu"
    experts: tuple[int, ...] = (8, 16, 74, 148)
    """Experts a layer (E), each a divisor of the FFN width: 4,736 or 18,944."""
    active: float = 0.25
    """Share of the experts that run per token; k is the nearest count."""
    layers: int | None = None
    """Fewer layers than the preset's, for less disk: dense model and one MoE are there at once."""
    batch_sizes: tuple[int, ...] | None = None
    """Left out: the preset's."""
    context_tokens: int = 128
    decode_steps: int = 8
    rounds: int = 10
    threads: int | None = None
    clock: Literal["wall", "cpu"] = "wall"
    """As in `dotmoe bench`; cpu for one thread on a busy machine."""
    out: Path = Path("results/throughput_by_granularity.json")
    work: Path | None = None
    """Where a folder for the models is made, and removed. Left out: the system's temporary one."""
    seed: int = 0


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    preset = PRESETS[settings.preset]
    require_device(preset.device)
    if settings.layers:
        preset = replace(preset, shape=replace(preset.shape, layers=settings.layers))
    with tempfile.TemporaryDirectory(dir=settings.work) as folder:
        dense = Path(folder) / "dense"
        write_random_dense(preset.shape, dense, getattr(torch, preset.dtype), settings.seed)
        runs = {str(e): measured_at(settings, preset, dense, e) for e in settings.experts}
    record = {"preset": settings.preset, "shape": asdict(preset.shape), "runs": runs}
    keep(settings.out, record, settings.seed)


def measured_at(settings: Settings, preset: Preset, dense: Path, experts: int) -> dict[str, Any]:
    """Write the MoE of one expert count, measure it beside the dense model, remove it."""
    shape, seed = preset.shape, settings.seed
    split = resolve(ExpertsConfig(experts=experts, active=settings.active), shape.ffn_width)
    moe = dense.parent / f"moe-{experts}"
    layout = random_layout(shape, experts, split.active_experts, seed)
    write_export(dense, layout, moe, TEXT_TOKENS, seed)
    config = BenchConfig(
        dense=str(dense),
        moe=str(moe),
        batch_sizes=settings.batch_sizes or preset.batch_sizes,
        prompt_tokens=0,
        context_tokens=settings.context_tokens,
        decode_steps=settings.decode_steps,
        rounds=settings.rounds,
        threads=settings.threads,
        clock=settings.clock,
        load=LoadConfig(dtype=preset.dtype, device=preset.device),
        seed=seed,
    )
    record = measured(config, f"{split.active_experts} of {experts} experts")
    shutil.rmtree(moe)
    # The folder was temporary: its name means nothing later.
    for side, name in (("dense", "dense"), ("moe", f"moe-{experts}")):
        record[side]["name"] = record["settings"][side] = name
    return record | {"granularity": asdict(split)}


if __name__ == "__main__":
    main()
