"""Decode throughput against batch size for several expert counts at equal active neurons.

    python benchmarks/throughput_by_granularity.py                       # a small model, CPU
    python benchmarks/throughput_by_granularity.py --preset qwen25_7b    # 7B widths, one GPU

The paper's figure (fig:throughput) has E = 8, 16, 74 and 148 with a quarter of the FFN active, in
vLLM; this one runs in stock Transformers, with the dense model beside. Models are random, since
speed does not depend on what they have learned. Writes JSON, CSV, and a figure if matplotlib is
there (`pip install 'dotmoe[plots]'`).
"""

import csv
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
    out: Path = Path("results/throughput_by_granularity")
    """Files to write, without their suffixes."""
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
    keep(settings.out.with_suffix(".json"), record, settings.seed)
    rows = table(runs)
    with settings.out.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, settings.out.with_suffix(".png"))


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


def table(runs: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each expert count and batch size; the dense model's speed is of the same run."""
    return [
        {
            "experts": run["granularity"]["num_experts"],
            "expert_size": run["granularity"]["expert_size"],
            "active_experts": run["granularity"]["active_experts"],
            "batch": point["point"]["batch"],
            "tokens_per_s": round(point["moe"]["tokens_per_s"], 2),
            "dense_tokens_per_s": round(point["dense"]["tokens_per_s"], 2),
            "ratio": round(point["speed_ratio"], 3),
            "ratio_first_quartile": round(point["speed_ratio_quartiles"][0], 3),
            "ratio_third_quartile": round(point["speed_ratio_quartiles"][1], 3),
            "bytes_ratio": round(point["bytes_ratio"], 3),
            "flops_ratio": round(point["flops_ratio"], 3),
        }
        for run in runs.values()
        for point in run["points"]
    ]


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Tokens per second, and their ratio to the dense model's, against batch size."""
    try:
        from matplotlib import pyplot
    except ImportError:
        print("matplotlib is not installed: no figure. pip install 'dotmoe[plots]'")
        return
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    batches = sorted({row["batch"] for row in rows})
    for experts in sorted({row["experts"] for row in rows}):
        own = [row for row in rows if row["experts"] == experts]
        label = f"{own[0]['active_experts']} of {experts}"
        for place, column in zip(axes, ("tokens_per_s", "ratio"), strict=True):
            place.plot([r["batch"] for r in own], [r[column] for r in own], marker="o", label=label)
    dense = [max(r["dense_tokens_per_s"] for r in rows if r["batch"] == b) for b in batches]
    axes[0].plot(batches, dense, color="black", linestyle="--", label="dense (best run)")
    axes[1].axhline(1, color="black", linestyle="--")
    for place, title in zip(axes, ("decoded tokens/s", "tokens/s, MoE / dense"), strict=True):
        place.set_xscale("log", base=2)
        place.set_xticks(batches, [str(batch) for batch in batches])
        place.set_xlabel("batch size")
        place.set_ylabel(title)
    axes[0].set_yscale("log")
    axes[0].legend(title="experts")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
