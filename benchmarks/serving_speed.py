"""Speed of a random dense model and its MoE in Transformers and in llama.cpp, beside the ideal.

    python benchmarks/serving_speed.py --threads 1

writes the models into `serving-speed-models` (kept, and used again) and the figures into
`results/serving_speed.json`. The default shape is d 1024, d_ffn 14336, 28 of 112 experts.
"""

import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.console import Console

from dotmoe.bench import BenchConfig, bench, tables
from dotmoe.export import ExportConfig, GgufConfig, export
from dotmoe.files import write_json
from dotmoe.layout import ExpertLayout
from dotmoe.load import LoadConfig, load_dense
from dotmoe.models.dense import DenseModel
from dotmoe.progress import Progress
from dotmoe.tables import to_rich
from random_models import Shape, random_layout, random_tokens, write_random_dense

TEXT_TOKENS = 2_048
VERIFY_TOKENS = 512
Case = Literal["float32", "bfloat16", "f32", "f16", "bf16", "q8_0", "q4_0"]
CHECKPOINTS = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What to write and measure."""

    cases: tuple[Case, ...] = ("float32", "f16", "q8_0")
    """float32, bfloat16: dtypes of Transformers; the others: types of GGUF weights."""
    shape: Shape = field(default_factory=Shape)
    experts: int = 112
    """Experts a layer (E), a divisor of the FFN width."""
    active_experts: int = 28
    """Experts that run per token (k)."""
    gguf_format: str = "gguf_llama"
    """Architecture of the GGUF files."""
    threads: int | None = None
    clock: Literal["wall", "cpu"] = "wall"
    """As in `dotmoe bench`; cpu for one thread on a busy machine."""
    rounds: int = 20
    batch_sizes: tuple[int, ...] = (1, 4, 16)
    prompt_tokens: int = 512
    context_tokens: tuple[int, ...] = (8, 128)
    """Contexts of decode; attention over a long one hides what the weights gain."""
    llama_cpp_repack: bool = False
    """As in `dotmoe bench`."""
    models: Path = Path("serving-speed-models")
    """Folder of the models; those that are there are not written again."""
    out: Path = Path("results/serving_speed.json")
    seed: int = 0


def main() -> None:
    settings = tyro.cli(Settings, config=(tyro.conf.OmitArgPrefixes,))
    progress = Progress()
    cases: dict[str, Any] = {}
    for case in settings.cases:
        models = pair(settings, case, progress)
        for context_tokens in settings.context_tokens:
            config = bench_config(settings, case, models, context_tokens)
            with progress.bar(f"{case}, context {context_tokens}") as update:
                result = bench(config, update)
            Console().print(*map(to_rich, tables(result)))
            cases[f"{result['runtime']} {case}, context {context_tokens}"] = result
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    described = {
        "shape": asdict(settings.shape),
        "experts": settings.experts,
        "active_experts": settings.active_experts,
        "seed": settings.seed,
    }
    write_json(settings.out, {**described, "cases": cases})


def bench_config(
    settings: Settings, case: Case, models: tuple[Path, Path], context_tokens: int
) -> BenchConfig:
    """Prefill has no context: it is measured once, with the first."""
    is_first = context_tokens == settings.context_tokens[0]
    return BenchConfig(
        dense=str(models[0]),
        moe=str(models[1]),
        batch_sizes=settings.batch_sizes,
        prompt_tokens=settings.prompt_tokens if is_first else 0,
        context_tokens=context_tokens,
        rounds=settings.rounds,
        threads=settings.threads,
        clock=settings.clock,
        llama_cpp_repack=settings.llama_cpp_repack,
        load=LoadConfig(dtype=case if case in CHECKPOINTS else "auto", device="cpu"),
        seed=settings.seed,
    )


def pair(settings: Settings, case: Case, progress: Progress) -> tuple[Path, Path]:
    """Dense model and MoE of a case; written where they are not there yet."""
    dtype = torch.bfloat16 if case == "bfloat16" else torch.float32
    source = settings.models / f"dense-{str(dtype).removeprefix('torch.')}"
    if not source.is_dir():
        progress.log(f"writing {source}")
        write_random_dense(settings.shape, source, dtype, settings.seed)
    if case in CHECKPOINTS:
        moe = settings.models / f"moe-{case}"
        if not moe.is_dir():
            progress.log(f"writing {moe}")
            dense, layout = loaded(settings, source, dtype)
            text_BT = random_tokens(settings.shape, 1, TEXT_TOKENS, settings.seed)
            export(dense, layout, moe, ExportConfig(verify_tokens=VERIFY_TOKENS), text_BT)
        return source, moe
    names = [settings.models / f"{kind}-{case}" for kind in ("dense", "moe")]
    if not all(name.is_dir() for name in names):
        write_gguf(settings, case, source, names, progress)
    return names[0] / f"model-{case}.gguf", names[1] / f"model-{case}.gguf"


def write_gguf(
    settings: Settings, case: Case, source: Path, names: list[Path], progress: Progress
) -> None:
    dense, layout = loaded(settings, source, torch.float32)
    text_BT = random_tokens(settings.shape, 1, TEXT_TOKENS, settings.seed)
    for name in names:
        shutil.rmtree(name, ignore_errors=True)
    progress.log(f"writing {names[0]} and {names[1]}")
    for name, form in zip(names, ("gguf_dense", settings.gguf_format), strict=True):
        config = ExportConfig(format=form, verify_tokens=VERIFY_TOKENS)
        gguf = GgufConfig(type=case, tokenizer="none")
        export(dense, layout, name, config, text_BT, gguf=gguf)


def loaded(settings: Settings, source: Path, dtype: torch.dtype) -> tuple[DenseModel, ExpertLayout]:
    layout = random_layout(settings.shape, settings.experts, settings.active_experts, settings.seed)
    load = LoadConfig(dtype=str(dtype).removeprefix("torch."), device="cpu")
    return load_dense(str(source), load), layout


if __name__ == "__main__":
    main()
