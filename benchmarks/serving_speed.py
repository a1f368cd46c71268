"""Speed of a random dense model and its MoE in Transformers and llama.cpp, against the ideal.

    python benchmarks/serving_speed.py --threads 1

writes the models into `serving-speed-models` (kept and reused) and the results into
`results/serving_speed.json`. The default shape is d 1024, d_ffn 14336, 28 of 112 experts.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import torch
import tyro

from dotmoe.bench import BenchConfig, bench, table
from dotmoe.load import LoadConfig
from dotmoe.progress import Progress
from dotmoe.tables import to_markdown
from random_models import Shape, random_layout, write_export, write_random_dense
from rounds import keep

TEXT_TOKENS = 2_048
VERIFY_TOKENS = 512
Case = Literal["float32", "bfloat16", "f32", "f16", "bf16", "q8_0", "q4_0"]
CHECKPOINTS: Final = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What to write and measure."""

    cases: tuple[Case, ...] = ("float32", "f16", "q8_0")
    """Number formats: float32 and bfloat16 run in Transformers, the others are GGUF types."""
    shape: Shape = field(default_factory=Shape)
    experts: int = 112
    """Experts per layer (E), a divisor of the FFN width."""
    active_experts: int = 28
    """Experts that run per token (k)."""
    gguf_format: str = "gguf_llama"
    """Architecture of the GGUF files."""
    threads: int | None = None
    clock: Literal["wall", "cpu"] = "wall"
    """Clock, as in `dotmoe bench`; cpu suits one thread on a busy machine."""
    rounds: int = 20
    batch_sizes: tuple[int, ...] = (1, 4, 16)
    prompt_tokens: int = 512
    context_tokens: tuple[int, ...] = (8, 128)
    """Context lengths of decode; attention over a long one hides the gain from fewer weights."""
    models: Path = Path("serving-speed-models")
    """Folder of the models; existing ones are not written again."""
    out: Path = Path("results/serving_speed.json")
    seed: int = 0


def main() -> None:
    settings = tyro.cli(Settings, config=(tyro.conf.OmitArgPrefixes,), description=__doc__)
    cases: dict[str, Any] = {}
    for case in settings.cases:
        dense, moe = pair(settings, case)
        for context_tokens in settings.context_tokens:
            is_first = context_tokens == settings.context_tokens[0]
            config = BenchConfig(
                dense=str(dense),
                moe=str(moe),
                batch_sizes=settings.batch_sizes,
                prompt_tokens=settings.prompt_tokens if is_first else 0,  # prefill has no context
                context_tokens=context_tokens,
                rounds=settings.rounds,
                threads=settings.threads,
                clock=settings.clock,
                load=LoadConfig(dtype=case if case in CHECKPOINTS else "auto", device="cpu"),
                seed=settings.seed,
            )
            result = measured(config, f"{case}, context {context_tokens}")
            cases[f"{result['runtime']} {case}, context {context_tokens}"] = result
    subject = {name: getattr(settings, name) for name in ("experts", "active_experts", "seed")}
    keep(settings.out, {"shape": asdict(settings.shape), **subject, "cases": cases})


def measured(config: BenchConfig, title: str) -> dict[str, Any]:
    """Result of `dotmoe bench`, also printed."""
    with Progress().bar(title) as update:
        result = bench(config, update)
    print(to_markdown(table(result)))
    return result


def pair(settings: Settings, case: Case) -> tuple[Path, Path]:
    """Paths of the dense model and the MoE of a case; written if missing."""
    dtype = torch.bfloat16 if case == "bfloat16" else torch.float32
    source = settings.models / f"dense-{str(dtype).removeprefix('torch.')}"
    if not source.is_dir():
        write_random_dense(settings.shape, source, dtype, settings.seed)
    if case in CHECKPOINTS:
        return source, written(settings, source, settings.models / f"moe-{case}", {})
    gguf = {"gguf_type": case, "gguf_tokenizer": "none"}
    dense, moe = (
        written(settings, source, settings.models / f"{kind}-{case}", gguf | {"format": name})
        for kind, name in (("dense", "gguf_dense"), ("moe", settings.gguf_format))
    )
    return dense / f"model-{case}.gguf", moe / f"model-{case}.gguf"


def written(settings: Settings, source: Path, out: Path, options: dict[str, Any]) -> Path:
    """Path of an export with a random split of the dense model; written if missing."""
    if not out.is_dir():
        Progress().log(f"writing {out}")
        shape, seed = settings.shape, settings.seed
        layout = random_layout(shape, settings.experts, settings.active_experts, seed)
        write_export(source, layout, out, TEXT_TOKENS, seed, verify_tokens=VERIFY_TOKENS, **options)
    return out


if __name__ == "__main__":
    main()
