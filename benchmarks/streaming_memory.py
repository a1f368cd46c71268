"""Peak memory and time of an export whose dense model never fits: weights stay on disk.

    python benchmarks/streaming_memory.py --threads 1     # minutes; results/streaming_memory.json

Writes random bfloat16 Llamas of about 1.6 and 3 GB into a temporary folder, which differ in depth
alone, and exports each with a random split to glm4_moe, verified, in a process of its own. Beside
the measured peak stands the bound: what the libraries take (the peak of exporting a tiny model in
the same process), the weights that are in memory at one time, the activations and logits of the
text, and what the C library keeps of freed memory.
"""

import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from transformers import LlamaConfig

from dotmoe.checkpoint.on_disk import on_disk
from dotmoe.export import ExportConfig, export
from dotmoe.export.format import TensorSpec
from dotmoe.export.safetensors_file import write_checkpoint
from dotmoe.files import write_json
from dotmoe.load import describe_dense
from dotmoe.parameters import meta_model
from dotmoe.provenance import provenance
from random_models import Shape, random_layout, random_tokens, write_random_dense

RESULTS = Path(__file__).resolve().parents[1] / "results" / "streaming_memory.json"
SEED = 0
EXPERTS, ACTIVE_EXPERTS = 64, 16
STORED, COMPUTED = torch.bfloat16.itemsize, torch.float32.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What to write and export."""

    shape: Shape = field(
        default_factory=lambda: Shape(
            width=2048, ffn_width=8192, layers=20, heads=16, kv_heads=16, vocabulary=32_000
        )
    )
    depths: tuple[int, ...] = (10, 20)
    """Layers of the models; the shape's own number is not read."""
    tokens: int = 64
    """Tokens of the text that scales the routers and verifies the export."""
    max_shard_gib: float = 1.0
    threads: int = 1
    only: str | None = None
    """Export the model in this folder in this process and print its figures; used by itself."""


def main() -> None:
    """Measure every depth in a process of its own and write the results."""
    settings = tyro.cli(Settings, description=__doc__)
    torch.set_num_threads(settings.threads)
    if settings.only is not None:
        print(json.dumps(export_from_disk(settings, Path(settings.only))))
        return
    models = []
    for depth in settings.depths:
        with tempfile.TemporaryDirectory() as scratch:
            shape = replace(settings.shape, layers=depth)
            model_bytes = write_dense(shape, Path(scratch), settings.max_shard_gib)
            figures = in_new_process(settings, depth, scratch)
        bound = {"libraries": figures["libraries_bytes"]} | bound_of(shape, settings.tokens)
        models.append(
            {
                "layers": depth,
                "checkpoint_bytes": model_bytes,
                **figures,
                "bound_parts_bytes": bound,
                "bound_bytes": sum(bound.values()),
                "peak_below_bound": figures["peak_bytes"] <= sum(bound.values()),
                "peak_share_of_checkpoint": figures["peak_bytes"] / model_bytes,
            }
        )
        print(json.dumps(models[-1], indent=2))
    shape = asdict(settings.shape)
    del shape["layers"]
    write_json(
        RESULTS,
        {
            "origin": "measured",
            "format": "glm4_moe",
            "shape": shape,
            "num_experts": EXPERTS,
            "active_experts": ACTIVE_EXPERTS,
            "tokens": settings.tokens,
            "models": models,
            "provenance": provenance(SEED),
        },
    )


def bound_of(shape: Shape, tokens: int) -> dict[str, int]:
    """Most bytes in memory at one time: of weights, of what depends on the text, and freed ones.

    Weights are at their most where an exported layer is checked: the layer as stored, its experts
    stacked, and a projection of its dense FFN as stored and in float32; or where a dense layer is
    there in float32, and its last projection as stored; or embedding or head as stored and in
    float32. Of freed memory glibc keeps 64 MiB, and of blocks below 32 MiB, which are the attention
    matrices and what depends on the text, all that lies under one still in use.
    """
    attention = shape.width * shape.width * (2 + 2 * shape.kv_heads // shape.heads)
    projection = shape.width * shape.ffn_width
    ffn = 3 * projection
    checked_layer = (attention + 2 * ffn) * STORED + projection * (STORED + COMPUTED)
    dense_layer = (attention + ffn) * COMPUTED + projection * STORED
    head = shape.vocabulary * shape.width * (STORED + COMPUTED)
    logits = 7 * tokens * shape.vocabulary * COMPUTED
    activations = 16 * tokens * shape.ffn_width * COMPUTED
    return {
        "weights": max(checked_layer, dense_layer, head),
        "text": logits + activations,
        "freed": 2**26 + attention * COMPUTED + logits + activations,
    }


def write_dense(shape: Shape, folder: Path, max_shard_gib: float) -> int:
    """Write a random dense model tensor by tensor, and a tiny one; bytes of the large one."""
    tiny = Shape(width=64, ffn_width=512, layers=1, heads=4, kv_heads=4)
    write_random_dense(tiny, folder / "tiny", torch.bfloat16, SEED)
    config = LlamaConfig.from_pretrained(folder / "tiny")
    config.update(
        {
            "hidden_size": shape.width,
            "intermediate_size": shape.ffn_width,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.width // shape.heads,
            "vocab_size": shape.vocabulary,
        }
    )
    dense = folder / "dense"
    shutil.copytree(
        folder / "tiny", dense, ignore=shutil.ignore_patterns("*.safetensors", "config.json")
    )
    config.save_pretrained(dense)
    generator = torch.Generator().manual_seed(SEED)
    specs = [
        TensorSpec(
            name=name,
            shape=tuple(parameter.shape),
            stored="BF16",
            make=lambda size=parameter.shape: random_weight(size, generator),
        )
        for name, parameter in meta_model(config).named_parameters()
    ]
    write_checkpoint(specs, dense, int(max_shard_gib * 2**30))
    return sum(spec.num_bytes for spec in specs)


def random_weight(size: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Norms of 1, and matrices that keep the variance of what they map."""
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    return (torch.randn(size, generator=generator) * size[-1] ** -0.5).bfloat16()


def in_new_process(settings: Settings, depth: int, scratch: str) -> dict[str, Any]:
    """What `export_from_disk` finds in a fresh process."""
    command = [
        *(sys.executable, __file__, "--only", scratch, "--shape.layers", str(depth)),
        *("--tokens", str(settings.tokens), "--threads", str(settings.threads)),
        *("--max-shard-gib", str(settings.max_shard_gib)),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def export_from_disk(settings: Settings, folder: Path) -> dict[str, Any]:
    """Export the tiny model, then the other, and take the time and the peak of memory."""
    one_export(settings, folder / "tiny", folder / "tiny-moe")
    libraries = peak_bytes()
    start, start_cpu = time.perf_counter(), time.process_time()
    written, record = one_export(settings, folder / "dense", folder / "moe")
    return {
        "libraries_bytes": libraries,
        "peak_bytes": peak_bytes(),
        "wall_s": time.perf_counter() - start,
        "cpu_s": time.process_time() - start_cpu,
        "exported_bytes": written,
        "verification": record,
    }


def one_export(settings: Settings, source: Path, out: Path) -> tuple[int, dict[str, Any]]:
    """Export a model from disk; bytes written and figures of the verification."""
    dense = on_disk(describe_dense(str(source)), torch.device("cpu"), torch.float32)
    widths = dense.widths
    shape = Shape(
        width=widths.model,
        ffn_width=widths.ffn,
        layers=widths.layers,
        vocabulary=widths.vocabulary,
    )
    layout = random_layout(shape, EXPERTS, ACTIVE_EXPERTS, SEED)
    config = ExportConfig(
        format="glm4_moe",
        max_shard_gib=settings.max_shard_gib,
        scale_tokens=settings.tokens,
        verify_tokens=settings.tokens,
    )
    record = export(dense, layout, out, config, random_tokens(shape, 1, settings.tokens, SEED))
    verification = record.verification
    return record.total_bytes, {
        "loaded_class": verification.loaded_class,
        "dtype": verification.dtype,
        "largest_block_error": max(layer.block_error for layer in verification.layers),
        "largest_block_floor": max(layer.block_floor for layer in verification.layers),
        "logits_error": verification.logits_error,
        "logits_floor": verification.logits_floor,
        "all_experts_logits_error": verification.dense_error,
    }


def peak_bytes() -> int:
    """Largest resident size of this process so far, mapped files included."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage counts what the starting process had before exec, too
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    main()
