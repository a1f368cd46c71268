"""Peak memory and time of an export that never holds the whole model: weights stay on disk.

    python benchmarks/streaming_memory.py --threads 1     # minutes; results/streaming_memory.json

Writes random bfloat16 Llamas of about 1.6 and 3 GB into a temporary folder, which differ only in
depth, and exports each with a random split to glm4_moe, verified, in a process of its own. The
measured peak is compared with a bound: the memory of the libraries (the peak of exporting a tiny
model in the same process), the weights in memory at one time, the activations and logits of the
text, and freed memory that the C library keeps.
"""

import json
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import tyro

from dotmoe.bench import peak_bytes
from random_models import Shape, random_layout, write_export, write_random_dense
from rounds import keep

SEED = 0
EXPERTS, ACTIVE_EXPERTS = 64, 16
STORED, COMPUTED = torch.bfloat16.itemsize, torch.float32.itemsize
TINY = Shape(width=64, ffn_width=512, layers=1, heads=4, kv_heads=4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What to write and export."""

    shape: Shape = field(
        default_factory=lambda: Shape(
            width=2048, ffn_width=8192, layers=20, heads=16, kv_heads=16, vocabulary=32_000
        )
    )
    depths: tuple[int, ...] = (10, 20)
    """Layers of each model; the number in the shape is ignored."""
    tokens: int = 64
    """Tokens of the text that scales the routers and verifies the export."""
    max_shard_gib: float = 1.0
    threads: int = 1
    out: Path = Path("results/streaming_memory.json")


def main() -> None:
    """Measure every depth in a process of its own and write the results."""
    settings = tyro.cli(Settings, description=__doc__)
    models = []
    for depth in settings.depths:
        shape = replace(settings.shape, layers=depth)
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            write_random_dense(TINY, folder / "tiny", torch.bfloat16, SEED)
            write_random_dense(shape, folder / "dense", torch.bfloat16, SEED)
            stored = sum(f.stat().st_size for f in (folder / "dense").glob("*.safetensors"))
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                figures = process.submit(exported, settings, shape, folder).result()
        bound = {"libraries": figures["libraries_bytes"]} | bound_of(shape, settings.tokens)
        models.append(
            {
                "layers": depth,
                "checkpoint_bytes": stored,
                **figures,
                "bound_parts_bytes": bound,
                "bound_bytes": sum(bound.values()),
                "peak_below_bound": figures["peak_bytes"] <= sum(bound.values()),
                "peak_share_of_checkpoint": figures["peak_bytes"] / stored,
            }
        )
        print(json.dumps(models[-1], indent=2))
    sizes = {name: size for name, size in asdict(settings.shape).items() if name != "layers"}
    subject = {"format": "glm4_moe", "num_experts": EXPERTS, "active_experts": ACTIVE_EXPERTS}
    subject |= {"shape": sizes, "tokens": settings.tokens}
    keep(settings.out, subject | {"models": models}, SEED)


def bound_of(shape: Shape, tokens: int) -> dict[str, int]:
    """Most bytes in memory at one time: weights, what depends on the text, and freed memory.

    Weights peak when an exported layer is loaded to be checked (the layer as stored, its stacked
    experts, and all of it in float32), or when a dense layer is held in float32 with its last
    projection as stored, or with embedding or head as stored and in float32. glibc keeps 64 MiB of
    freed memory, and all freed blocks below 32 MiB (the attention matrices and what depends on the
    text) that lie under one still in use.
    """
    attention = shape.width * shape.width * (2 + 2 * shape.kv_heads // shape.heads)
    projection = shape.width * shape.ffn_width
    ffn = 3 * projection
    checked_layer = (attention + 2 * ffn) * STORED + (attention + ffn) * COMPUTED
    dense_layer = (attention + ffn) * COMPUTED + projection * STORED
    head = shape.vocabulary * shape.width * (STORED + COMPUTED)
    logits = 7 * tokens * shape.vocabulary * COMPUTED
    activations = 16 * tokens * shape.ffn_width * COMPUTED
    return {
        "weights": max(checked_layer, dense_layer, head),
        "text": logits + activations,
        "freed": 2**26 + attention * COMPUTED + logits + activations,
    }


def exported(settings: Settings, shape: Shape, folder: Path) -> dict[str, Any]:
    """Export the tiny model, then the other; measure its time and the peak of memory."""
    torch.set_num_threads(settings.threads)
    one_export(settings, TINY, folder / "tiny", folder / "tiny-moe")
    libraries = peak_bytes()
    start, start_cpu = time.perf_counter(), time.process_time()
    figures = one_export(settings, shape, folder / "dense", folder / "moe")
    return {
        "libraries_bytes": libraries,
        "peak_bytes": peak_bytes(),
        "wall_s": time.perf_counter() - start,
        "cpu_s": time.process_time() - start_cpu,
        **figures,
    }


def one_export(settings: Settings, shape: Shape, source: Path, out: Path) -> dict[str, Any]:
    """Export a model from disk; return bytes written and metrics of the verification."""
    layout = random_layout(shape, EXPERTS, ACTIVE_EXPERTS, SEED)
    record = write_export(
        source,
        layout,
        out,
        settings.tokens,
        SEED,
        format="glm4_moe",
        max_shard_gib=settings.max_shard_gib,
        scale_tokens=settings.tokens,
        verify_tokens=settings.tokens,
    )
    return {"exported_bytes": record.total_bytes, "verification": record.verification_in_short()}


if __name__ == "__main__":
    main()
