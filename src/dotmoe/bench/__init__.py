"""`dotmoe bench`: how fast a dense model and its MoE run, in one run, beside what is possible."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
from tyro.conf import Positional

from dotmoe.bench.runners import Loaded, Point, Setup, llama_library
from dotmoe.bench.sources import LLAMA_CPP, Source, sources
from dotmoe.bench.work import causal_keys, expected_experts
from dotmoe.distributed import resolved_device
from dotmoe.errors import UserError
from dotmoe.llama_cpp import REMEDIES
from dotmoe.load import LoadConfig
from dotmoe.options import at_least, check
from dotmoe.progress import Update, no_update
from dotmoe.provenance import provenance
from dotmoe.tables import Table, in_bytes, percent
from dotmoe.worker import Worker

PROTOCOL = (
    "Both models are held in processes of their own. At each point they are warmed up, then take "
    "turns for the rounds, in alternating order; every round starts from the same cache. Tokens "
    "per second and their ratio are from the best decile of the times of all steps, the spread "
    "is the quartiles over rounds of the ratio of median times. Tokens are drawn evenly from the "
    "vocabulary. Ideal ratio: of the bytes of weights read (decode) or of the floating-point "
    "operations (prefill), dense / MoE, as the runtime stores the weights. Bytes of the cache are "
    "not in it: attention costs both models the same, and lowers the share as the context grows. A "
    "share of the ideal above 1 means that something else bounds the dense model."
)
_REMEDIES = {"": "If memory ran out, lower batch_sizes, prompt_tokens or context_tokens."}

Rounds = Sequence[Sequence[float]]
"""Seconds of each step, by round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchConfig:
    """Two models, and what to measure on them."""

    dense: Annotated[Positional[str], tyro.conf.arg(metavar="DENSE")]
    """Dense model: checkpoint folder or hub name, run by Transformers, or .gguf file, run by
    llama.cpp on the CPU."""
    moe: Annotated[Positional[str], tyro.conf.arg(metavar="MOE")]
    """What was made of it, of the same kind; of a run folder, its export."""
    batch_sizes: tuple[Annotated[int, at_least(1)], ...] = (1, 4, 16)
    """Sequences that are decoded at once, each at least 1; none to leave decode out."""
    prompt_tokens: Annotated[int, at_least(0)] = 512
    """Length of the prompt of prefill; 0 to leave prefill out."""
    context_tokens: Annotated[int, at_least(1)] = 128
    """Tokens that each sequence has in its cache when a round of decode starts, at least 1."""
    decode_steps: Annotated[int, at_least(1)] = 8
    """Tokens that each sequence decodes in a round, at least 1."""
    rounds: Annotated[int, at_least(1)] = 10
    """Turns of each model at each point, at least 1."""
    threads: Annotated[int | None, at_least(1)] = None
    """CPU threads of each model, at least 1. Left out: those that torch uses."""
    clock: Literal["wall", "cpu"] = "wall"
    """What times are taken from. cpu: seconds that one thread computed, without those in which
    other processes had its processor; for a busy machine, with --threads 1 and no GPU."""
    load: LoadConfig = field(default_factory=LoadConfig)
    seed: Annotated[int, at_least(0)] = 0
    """Of the tokens that are fed in."""

    def check_together(self) -> None:
        """Refuse a benchmark of nothing."""
        if not self.batch_sizes and not self.prompt_tokens:
            raise UserError(
                "batch_sizes is empty and prompt_tokens 0, which leaves nothing to measure. "
                "Give one of them."
            )

    @property
    def points(self) -> list[Point]:
        """What is measured, in order."""
        prefill = Point(name="prefill", batch=1, tokens=self.prompt_tokens, steps=1)
        decode = [
            Point(name="decode", batch=batch, tokens=self.context_tokens, steps=self.decode_steps)
            for batch in self.batch_sizes
        ]
        return [prefill, *decode] if self.prompt_tokens else decode


def bench(config: BenchConfig, on_progress: Update = no_update) -> dict[str, Any]:
    """Measure both models in one run, in turns; both are in memory, each in its own process.

    Args:
        config: See `BenchConfig`.
        on_progress: Told rounds done, rounds in all, and the point.

    Returns:
        JSON values: both models, every point of both, ratios, settings and provenance.

    Raises:
        UserError: See `sources`; or a device or context that there is not, or too little memory.
    """
    check(config)
    runtime, *found = sources(config.dense, config.moe)
    for source in found:
        _require_context(config, source)
    threads = config.threads or torch.get_num_threads()
    is_llama = runtime == LLAMA_CPP
    device = "cpu" if is_llama else str(resolved_device(config.load.device))
    if config.clock == "cpu" and (threads > 1 or device != "cpu"):
        raise UserError(
            f"clock is cpu with {threads} threads on {device}, but it adds up all threads and sees "
            "no GPU. Set threads to 1 and device to cpu, or clock to wall."
        )
    runner = f"dotmoe.bench.runners:{'LlamaRunner' if is_llama else 'TransformersRunner'}"
    with ExitStack() as stack:
        workers = []
        for source in found:
            setup = Setup(
                path=str(source.path),
                device=device,
                dtype=config.load.dtype,
                threads=threads,
                clock=config.clock,
                seed=config.seed,
            )
            worker = Worker(
                runner,
                setup,
                name=f"{runtime} on {source.path}",
                threads=threads,
                remedies=REMEDIES if is_llama else _REMEDIES,
            )
            workers.append(stack.enter_context(worker))
        loaded: list[Loaded] = [worker.ask("load") for worker in workers]
        points = _measured(config, workers, loaded, on_progress)
    dense, moe = [
        {"name": source.name, "loaded": asdict(each), "stored_bytes": each.weights.stored_bytes}
        for source, each in zip(found, loaded, strict=True)
    ]
    made = provenance(config.seed) | {"threads": threads}
    if is_llama:
        made["versions"]["llama_cpp_python"] = llama_library().__version__
    settings = asdict(config) | {"threads": threads, "device": device}
    return {
        "origin": "measured",
        "protocol": PROTOCOL,
        "runtime": runtime,
        "dense": dense,
        "moe": moe,
        "points": points,
        "settings": settings | {"batch_sizes": list(config.batch_sizes)},
        "provenance": made,
    }


def _measured(
    config: BenchConfig, workers: list[Worker], loaded: list[Loaded], on_progress: Update
) -> list[dict[str, Any]]:
    total, done, results = config.rounds * len(config.points), 0, []
    for point in config.points:
        note = f"{point.name}, batch {point.batch}"
        on_progress(done, total, note)
        touched = [worker.ask("prepare", point) for worker in workers]
        rounds: list[list[list[float]]] = [[], []]
        for turn in range(config.rounds):
            for side in (0, 1) if turn % 2 == 0 else (1, 0):
                rounds[side].append(workers[side].ask("run"))
            done += 1
            on_progress(done, total, note)
        dense, moe = [
            _side(point, loaded[side], rounds[side], touched[side])
            | {"peak_bytes": workers[side].ask("finish")}
            for side in (0, 1)
        ]
        bytes_ratio = dense["weight_bytes"] / moe["weight_bytes"]
        flops_ratio = dense["flops_per_token"] / moe["flops_per_token"]
        ideal = bytes_ratio if point.name == "decode" else flops_ratio
        ratio = moe["tokens_per_s"] / dense["tokens_per_s"]
        results.append(
            {
                "point": asdict(point),
                "dense": dense,
                "moe": moe,
                "speed_ratio": ratio,
                "speed_ratio_quartiles": ratio_quartiles(*rounds),
                "bytes_ratio": bytes_ratio,
                "flops_ratio": flops_ratio,
                "ideal_ratio": ideal,
                "share_of_ideal": ratio / ideal,
            }
        )
    return results


def _side(point: Point, loaded: Loaded, rounds: Rounds, touched: float | None) -> dict[str, Any]:
    """One model at one point."""
    work, tokens = loaded.weights, point.tokens_per_step
    best, middle, worst = np.quantile(np.concatenate(rounds), [0.1, 0.5, 0.9]).tolist()
    origin = "measured"
    if not work.num_experts:
        touched, origin = 0.0, "none"
    elif touched is None:
        touched = expected_experts(work.num_experts, work.active_experts, tokens)
        origin = "independent routing"
    keys, head_rows = float(causal_keys(point.tokens)), 1  # of a prompt, the last token's logits
    if point.name == "decode":  # the mean over the steps of a round
        keys = point.batch * causal_keys(point.steps, before=point.tokens) / point.steps
        head_rows = point.batch
    return {
        "tokens_per_s": tokens / best,
        "timing": {
            "best_decile_s": best,
            "median_s": middle,
            "worst_decile_s": worst,
            "samples": sum(map(len, rounds)),
        },
        "experts_touched": touched,
        "experts_touched_by": origin,
        "weight_bytes": work.touched_bytes(tokens, touched),
        "flops_per_token": work.flops(tokens, keys, head_rows=head_rows) / tokens,
    }


def ratio_quartiles(dense: Rounds, moe: Rounds) -> list[float]:
    """First and third quartile, over rounds, of how many times faster the MoE was in a round."""
    ratios = [np.median(a) / np.median(b) for a, b in zip(dense, moe, strict=True)]
    quartiles: list[float] = np.quantile(ratios, [0.25, 0.75]).tolist()
    return quartiles


def tables(result: dict[str, Any]) -> list[Table]:
    """What `bench` measured: both models, then a line for each point with speed and work."""
    settings, hardware = result["settings"], result["provenance"]["hardware"]
    models, speeds, works = [], [], []
    for label, side in (("dense", result["dense"]), ("MoE", result["moe"])):
        loaded = side["loaded"]
        work = loaded["weights"]
        experts = f"{work['active_experts']} of {work['num_experts']}"
        split = experts if work["num_experts"] else None
        size = in_bytes(side["stored_bytes"])
        models.append([label, side["name"], loaded["dtype"], split, size])
    for each in result["points"]:
        point, dense, moe = each["point"], each["dense"], each["moe"]
        is_prefill = point["name"] == "prefill"
        name = f"prefill {point['tokens']}" if is_prefill else f"decode x {point['batch']}"
        speeds.append(
            [
                name,
                f"{dense['tokens_per_s']:,.1f}",
                f"{moe['tokens_per_s']:,.1f}",
                f"{each['speed_ratio']:.2f}",
                "{:.2f}-{:.2f}".format(*each["speed_ratio_quartiles"]),
                f"{each['ideal_ratio']:.2f}",
                percent(each["share_of_ideal"]),
            ]
        )
        both = [
            f"{dense[key] / unit:,.1f} / {moe[key] / unit:,.1f}"
            for key, unit in (
                ("weight_bytes", 2**20),
                ("flops_per_token", 1e6),
                ("peak_bytes", 2**20),
            )
        ]
        works.append([name, *both, f"{moe['experts_touched']:.1f}"])
    unit = "tokens/s" if settings["clock"] == "wall" else "tokens/CPU s"
    origins = sorted({each["moe"]["experts_touched_by"] for each in result["points"]})
    return [
        Table(
            title=f"{result['runtime']} on {hardware}, {settings['threads']} "
            f"threads, {settings['rounds']} rounds in turns",
            columns=("", "model", "dtype", "experts", "weights"),
            rows=models,
            words=3,
        ),
        Table(
            columns=(unit, "dense", "MoE", "ratio", "quartiles", "ideal", "of ideal"), rows=speeds
        ),
        Table(
            columns=("dense / MoE", "weights read, MiB", "MFLOP a token", "peak, MiB", "experts"),
            rows=works,
            note="ratio: MoE / dense, best decile of all steps; quartiles: over rounds, median "
            "times. ideal: bytes of weights read (decode), FLOPs (prefill), dense / MoE. experts: "
            f"distinct ones a layer and step, {', '.join(origins)}. peak: memory of the process on "
            "a CPU, allocated on a GPU.",
        ),
    ]


def _require_context(config: BenchConfig, source: Source) -> None:
    wanted = {"prompt_tokens": config.prompt_tokens}
    if config.batch_sizes:
        wanted["context_tokens + decode_steps"] = config.context_tokens + config.decode_steps
    for name, tokens in wanted.items():
        if tokens > source.context:
            raise UserError(
                f"{name} is {tokens}, but {source.name} has a context of {source.context}. "
                f"Choose at most {source.context}."
            )
