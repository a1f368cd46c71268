"""`dotmoe bench`: how fast a dense model and its MoE run, in one run, beside what is possible."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from dotmoe.bench.points import Clock, Point, Runtime, WorkerSetup
from dotmoe.bench.rendering import render
from dotmoe.bench.results import BenchModel, BenchResult, Measured, PointResult, point_result
from dotmoe.bench.sources import Source, sources
from dotmoe.bench.worker_process import WorkerProcess
from dotmoe.device import resolved_device
from dotmoe.errors import UserError
from dotmoe.load import LoadConfig
from dotmoe.run_folder import provenance

__all__ = ["BenchConfig", "BenchResult", "bench", "render"]

Update = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchConfig:
    """Two models, and what to measure on them."""

    dense: Annotated[Positional[str], tyro.conf.arg(metavar="DENSE")]
    """Dense model: checkpoint folder or hub name, run by Transformers, or .gguf file, run by
    llama.cpp on the CPU."""
    moe: Annotated[Positional[str], tyro.conf.arg(metavar="MOE")]
    """What was made of it, of the same kind; of a run folder, its export."""
    batch_sizes: tuple[int, ...] = (1, 4, 16)
    """Sequences that are decoded at once, each at least 1; none to leave decode out."""
    prompt_tokens: int = 512
    """Length of the prompt of prefill; 0 to leave prefill out."""
    context_tokens: int = 128
    """Tokens that each sequence has in its cache when a round of decode starts, at least 1."""
    decode_steps: int = 8
    """Tokens that each sequence decodes in a round, at least 1."""
    rounds: int = 10
    """Turns of each model at each point, at least 1."""
    threads: int | None = None
    """CPU threads of each model, at least 1. Left out: all processors this process may use."""
    experts_implementation: Literal["grouped_mm", "eager", "batched_mm"] = "grouped_mm"
    """How Transformers computes the experts; grouped_mm is its default."""
    llama_cpp_repack: bool = False
    """Let llama.cpp rearrange weights for special kernels, as it does by itself. Some of these know
    no experts, and those for AMX have crashed; without, both models use the same kernels."""
    clock: Clock = "wall"
    """What times are taken from. cpu: seconds that one thread computed, without those in which
    other processes had its processor; for a busy machine, with --threads 1 and no GPU."""
    load: LoadConfig = field(default_factory=LoadConfig)
    seed: int = 0
    """Of the tokens that are fed in."""

    def __post_init__(self) -> None:
        """Refuse counts that cannot be run."""
        for name, least in (
            ("prompt_tokens", 0),
            ("context_tokens", 1),
            ("decode_steps", 1),
            ("rounds", 1),
            ("threads", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name} is {value}, but it must be at least {least}.")
        if any(batch < 1 for batch in self.batch_sizes):
            raise UserError(f"batch_sizes are {self.batch_sizes}, but each must be at least 1.")
        if not self.batch_sizes and not self.prompt_tokens:
            raise UserError(
                "batch_sizes is empty and prompt_tokens 0, which leaves nothing to measure. "
                "Give one of them."
            )

    @property
    def points(self) -> tuple[Point, ...]:
        """What is measured, in order."""
        prefill = Point(name="prefill", batch=1, tokens=self.prompt_tokens, steps=1)
        decode = [
            Point(name="decode", batch=batch, tokens=self.context_tokens, steps=self.decode_steps)
            for batch in self.batch_sizes
        ]
        return (*((prefill,) if self.prompt_tokens else ()), *decode)


def bench(config: BenchConfig, on_progress: Update) -> BenchResult:
    """Measure both models in one run, in turns.

    Both are in memory at the same time, each in a process of its own.

    Args:
        config: See `BenchConfig`.
        on_progress: Told rounds done, rounds in all, and the point.

    Raises:
        UserError: See `sources`; or a device or context that there is not, or too little memory.
    """
    runtime, dense, moe = sources(config.dense, config.moe)
    _require_context(config, (dense, moe))
    threads = config.threads or usable_processors()
    device = "cpu" if runtime == "llama.cpp" else str(resolved_device(config.load.device))
    if config.clock == "cpu" and (threads > 1 or device != "cpu"):
        raise UserError(
            f"clock is cpu with {threads} threads on {device}, but it adds up all threads and sees "
            "no GPU. Set threads to 1 and device to cpu, or clock to wall."
        )
    load_before = load_average()
    with ExitStack() as stack:
        workers = []
        for source in (dense, moe):
            setup = WorkerSetup(
                runtime=runtime,
                path=str(source.path),
                device=device,
                dtype=config.load.dtype,
                threads=threads,
                experts_implementation=config.experts_implementation,
                repack=config.llama_cpp_repack,
                clock=config.clock,
                seed=config.seed,
            )
            workers.append(stack.enter_context(WorkerProcess(setup)))
        models = [
            BenchModel(name=source.name, loaded=worker.load())
            for source, worker in zip((dense, moe), workers, strict=True)
        ]
        points = tuple(_measured_points(config, workers, models, on_progress))
    settings = asdict(config) | {"batch_sizes": list(config.batch_sizes)}
    return BenchResult(
        runtime=runtime,
        dense=models[0],
        moe=models[1],
        points=points,
        settings=settings | {"threads": threads, "device": device},
        provenance=_provenance(config.seed, threads, runtime)
        | {"load_average": {"before": load_before, "after": load_average()}},
    )


def _require_context(config: BenchConfig, found: tuple[Source, Source]) -> None:
    wanted = {"prompt_tokens": config.prompt_tokens}
    if config.batch_sizes:
        wanted["context_tokens + decode_steps"] = config.context_tokens + config.decode_steps
    for source in found:
        for name, tokens in wanted.items():
            if tokens > source.context:
                raise UserError(
                    f"{name} is {tokens}, but {source.name} has a context of {source.context}. "
                    f"Choose at most {source.context}."
                )


def _measured_points(
    config: BenchConfig,
    workers: list[WorkerProcess],
    models: list[BenchModel],
    on_progress: Update,
) -> Iterator[PointResult]:
    total, done = config.rounds * len(config.points), 0
    for point in config.points:
        note = f"{point.name}, batch {point.batch}"
        on_progress(done, total, note)
        touched = [worker.prepare(point) for worker in workers]
        rounds: list[list[tuple[float, ...]]] = [[], []]
        for turn in range(config.rounds):
            for side in (0, 1) if turn % 2 == 0 else (1, 0):
                rounds[side].append(tuple(workers[side].run()))
            done += 1
            on_progress(done, total, note)
        sides = [
            Measured(
                weights=models[side].loaded.weights,
                rounds=tuple(rounds[side]),
                experts_touched=touched[side],
                peak_bytes=workers[side].finish(),
            )
            for side in (0, 1)
        ]
        yield point_result(point, *sides)


def usable_processors() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load_average() -> float | None:
    """Processes that wanted to run, mean of the last minute; None where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def _provenance(seed: int, threads: int, runtime: Runtime) -> dict[str, Any]:
    made = provenance(seed) | {"threads": threads, "processor": _processor()}
    if runtime == "llama.cpp":
        for package in ("llama_cpp_python", "gguf"):
            try:
                made["versions"][package] = version(package)
            except PackageNotFoundError:
                made["versions"][package] = "not installed as a package"
    return made


def _processor() -> str | None:
    """Model and widest vector instructions of the CPU; None where the system does not say."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return None
    fields: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = set(fields.get("flags", "").split())
    vector = [flag for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if flag in flags]
    return ", ".join([fields.get("model name", "unknown"), *vector])
