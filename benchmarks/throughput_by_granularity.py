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
from rich.console import Console

from dotmoe.bench import BenchConfig, bench, tables
from dotmoe.export import ExportConfig, export
from dotmoe.files import write_json
from dotmoe.granularity import ExpertsConfig, resolve
from dotmoe.load import LoadConfig, load_dense
from dotmoe.progress import Progress
from dotmoe.tables import to_rich
from random_models import Shape, random_layout, random_tokens, write_random_dense

TEXT_TOKENS = 2_048


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
        shape=Shape(
            width=3_584,
            ffn_width=18_944,
            layers=28,
            heads=28,
            kv_heads=4,
            vocabulary=152_064,
        ),
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
    settings = tyro.cli(Settings)
    preset = PRESETS[settings.preset]
    if settings.layers:
        preset = replace(preset, shape=replace(preset.shape, layers=settings.layers))
    runs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=settings.work) as folder:
        dense = Path(folder) / "dense"
        write_random_dense(preset.shape, dense, getattr(torch, preset.dtype), settings.seed)
        for experts in settings.experts:
            runs[str(experts)] = measured(settings, preset, dense, experts)
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    record = {"preset": settings.preset, "shape": asdict(preset.shape), "runs": runs}
    write_json(settings.out.with_suffix(".json"), record)
    rows = table(runs)
    with settings.out.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, settings.out.with_suffix(".png"))


def measured(settings: Settings, preset: Preset, dense: Path, experts: int) -> dict[str, Any]:
    """Write the MoE of one expert count, measure it beside the dense model, remove it."""
    progress = Progress()
    split = resolve(ExpertsConfig(experts=experts, active=settings.active), preset.shape.ffn_width)
    moe = dense.parent / f"moe-{experts}"
    model = load_dense(str(dense), LoadConfig(dtype=preset.dtype, device=preset.device))
    layout = random_layout(preset.shape, experts, split.active_experts, settings.seed)
    export(
        model,
        layout,
        moe,
        ExportConfig(),
        random_tokens(preset.shape, 1, TEXT_TOKENS, settings.seed),
    )
    del model
    if preset.device != "cpu":
        torch.cuda.empty_cache()
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
        seed=settings.seed,
    )
    with progress.bar(f"{split.active_experts} of {experts} experts") as update:
        result = bench(config, update)
    Console().print(*map(to_rich, tables(result)))
    shutil.rmtree(moe)
    record = result
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
        Progress().log("matplotlib is not installed: no figure. pip install 'dotmoe[plots]'")
        return
    figure, (speed, ratio) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    counts = sorted({row["experts"] for row in rows})
    batches = sorted({row["batch"] for row in rows})
    for experts in counts:
        own = [row for row in rows if row["experts"] == experts]
        label = f"{own[0]['active_experts']} of {experts}"
        for axes, column in ((speed, "tokens_per_s"), (ratio, "ratio")):
            axes.plot([r["batch"] for r in own], [r[column] for r in own], marker="o", label=label)
    dense = [
        max(row["dense_tokens_per_s"] for row in rows if row["batch"] == batch) for batch in batches
    ]
    speed.plot(batches, dense, color="black", linestyle="--", label="dense (best run)")
    ratio.axhline(1, color="black", linestyle="--")
    for axes, title in ((speed, "decoded tokens/s"), (ratio, "tokens/s, MoE / dense")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.set_xlabel("batch size")
        axes.set_ylabel(title)
    speed.set_yscale("log")
    speed.legend(title="experts")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
