"""`dotmoe bench`: how fast a dense model and its MoE run, in one run, beside what is possible."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import tyro
from tyro.conf import Positional

from dotmoe.distributed import resolved_device
from dotmoe.errors import UserError
from dotmoe.evaluate.models import model_folder
from dotmoe.files import Values
from dotmoe.load import LoadConfig
from dotmoe.options import above, at_least, at_most, check
from dotmoe.progress import Update, no_update
from dotmoe.provenance import provenance
from dotmoe.tables import Table, in_bytes, percent, table_of
from dotmoe.worker import Worker

PROTOCOL = (
    "Both models are held in processes of their own. At each point they are warmed up, then take "
    "turns for the rounds, in alternating order; every round starts from the same cache. Tokens "
    "per second and their ratio are from a low quantile (--quantile) of the times of all steps, "
    "the spread is the quartiles over rounds of the ratio of median times. Tokens are drawn evenly "
    "from the vocabulary. Ideal ratio: of the bytes of weights read (decode) or of the multiply-"
    "adds with weights (prefill), dense / MoE, as the runtime stores the weights; a step of decode "
    "reads the distinct experts that independent, even routing would choose. Attention over the "
    "context is not in it: it costs both models the same, and lowers the share as the context "
    "grows. A share of the ideal above 1 means that something else bounds the dense model."
)

Rounds = Sequence[Sequence[float]]
"""Seconds of each step, by round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchConfig:
    """Two models, and what to measure on them."""

    dense: Annotated[Positional[str], tyro.conf.arg(metavar="DENSE")]
    """Dense model: checkpoint folder, hub name or .gguf file."""
    moe: Annotated[Positional[str], tyro.conf.arg(metavar="MOE")]
    """What was made of it, of a run folder its export: run by Transformers, as DENSE then is too,
    or a .gguf file like DENSE, both run by llama.cpp on the CPU."""
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
    quantile: Annotated[float, above(0), at_most(0.5)] = 0.1
    """Quantile of the seconds of all steps that a speed is taken from: low for a busy machine, 0.5
    (the median) for a quiet one."""
    threads: Annotated[int | None, at_least(1)] = None
    """CPU threads of each model, at least 1. Left out: those that torch uses."""
    clock: Literal["wall", "cpu"] = "wall"
    """What times are taken from. cpu: seconds that one thread computed, without those in which
    other processes had its processor; for a busy machine, with --threads 1 and no GPU."""
    load: LoadConfig = field(default_factory=LoadConfig)
    seed: Annotated[int, at_least(0)] = 0
    """Of the tokens that are fed in."""
    json: bool = False
    """Print JSON instead of tables."""

    def check_together(self) -> None:
        """Refuse a benchmark of nothing."""
        if not self.batch_sizes and not self.prompt_tokens:
            raise UserError(
                "batch_sizes is empty and prompt_tokens 0, which leaves nothing to measure. "
                "Give one of them."
            )

    @property
    def points(self) -> list[Values]:
        """What is measured, in order: `name`, `batch`, `tokens`, and `steps` of decode."""
        prefill = {"name": "prefill", "batch": 1, "tokens": self.prompt_tokens, "steps": 0}
        decode = {"name": "decode", "tokens": self.context_tokens, "steps": self.decode_steps}
        points = [decode | {"batch": batch} for batch in self.batch_sizes]
        return [prefill, *points] if self.prompt_tokens else points


def bench(config: BenchConfig, on_progress: Update = no_update) -> Values:
    """Measure both models in one run, in turns; both are in memory, each in its own process.

    `on_progress` is told rounds done, rounds in all, and the point.

    Returns:
        JSON values: both models, every point of both, ratios, settings and provenance.

    Raises:
        UserError: The two are not a dense model and its MoE, or not for the same software; no such
            model, device or context, no llama.cpp, or too little memory.
    """
    check(config)
    in_gguf = config.moe.lower().endswith(".gguf")
    if in_gguf and not config.dense.lower().endswith(".gguf"):
        raise UserError(
            f"{config.moe} is a GGUF file and {config.dense} is not, but both must run in the same "
            "software. Give two GGUF files or two checkpoints."
        )
    threads = config.threads or torch.get_num_threads()
    device = "cpu" if in_gguf else str(resolved_device(config.load.device))
    if config.clock == "cpu" and (threads > 1 or device != "cpu"):
        raise UserError(
            f"clock is cpu with {threads} threads on {device}, but it adds up all threads and sees "
            "no GPU. Set threads to 1 and device to cpu, or clock to wall."
        )
    runtime = "llama.cpp" if in_gguf else "transformers"
    runner = f"dotmoe.bench.runners:{'LlamaRunner' if in_gguf else 'TransformersRunner'}"
    options = config.load.dtype, device, threads, config.clock, config.seed
    remedy = "If memory ran out, lower batch_sizes, prompt_tokens or context_tokens."
    with ExitStack() as stack:
        workers = []
        for name in (config.dense, config.moe):
            path = Path(name).expanduser() if in_gguf else model_folder(name)
            called = f"{runtime} on {path}"
            worker = Worker(runner, str(path), *options, name=called, remedy=remedy)
            workers.append(stack.enter_context(worker))
        models = [worker.ask("loaded") for worker in workers]
        _require_a_pair(config, *models)
        points = _measured(config, workers, models, on_progress)
    made = provenance(config.seed) | {"threads": threads}
    if in_gguf:
        made["versions"]["llama_cpp_python"] = version("llama_cpp_python")
    return {
        "origin": "measured",
        "protocol": PROTOCOL,
        "runtime": runtime,
        "dense": {"name": config.dense, **models[0]},
        "moe": {"name": config.moe, **models[1]},
        "points": points,
        "settings": asdict(config) | {"threads": threads, "device": device},
        "provenance": made,
    }


def _require_a_pair(config: BenchConfig, dense: Values, moe: Values) -> None:
    experts, sizes = (
        [each["weights"][what] for each in (dense, moe)] for what in ("experts", "embedding")
    )
    if experts[0] or not experts[1] or sizes[0] != sizes[1]:
        raise UserError(
            f"{config.dense} has {experts[0]} experts a layer and an embedding {sizes[0]}, "
            f"{config.moe} {experts[1]} and {sizes[1]}. Give a dense model, then what was made "
            "of it."
        )
    context = min(dense["context"], moe["context"])
    lengths = {
        "prompt_tokens": config.prompt_tokens,
        "context_tokens + decode_steps": config.context_tokens + config.decode_steps,
    }
    for name, tokens in lengths.items():
        if tokens > context:
            raise UserError(f"{name} is {tokens}, but the context is {context}. Take no more.")


def _measured(
    config: BenchConfig, workers: list[Worker], models: list[Values], on_progress: Update
) -> list[Values]:
    done, total, results = 0, config.rounds * len(config.points), []
    for point in config.points:
        note = f"{point['name']}, batch {point['batch']}"
        on_progress(done, total, note)
        for worker in workers:
            worker.ask("prepare", point["batch"], point["tokens"], point["steps"])
        rounds: list[list[list[float]]] = [[], []]
        for turn in range(config.rounds):
            for side in (0, 1) if turn % 2 == 0 else (1, 0):
                rounds[side].append(workers[side].ask("run"))
            on_progress(done := done + 1, total, note)
        dense, moe = [
            _side(point, model["weights"], seconds, config.quantile)
            | {"peak_bytes": worker.ask("peak")}
            for worker, model, seconds in zip(workers, models, rounds, strict=True)
        ]
        work = "weight_bytes" if point["steps"] else "products_per_token"
        ideal, ratio = dense[work] / moe[work], moe["tokens_per_s"] / dense["tokens_per_s"]
        ratios = {
            "speed_ratio": ratio,
            "speed_ratio_quartiles": ratio_quartiles(*rounds),
            "ideal_ratio": ideal,
            "share_of_ideal": ratio / ideal,
        }
        results.append({"point": point, "dense": dense, "moe": moe, **ratios})
    return results


def _side(point: Values, weights: Values, rounds: Rounds, quantile: float) -> Values:
    """One model at one point."""
    head, fixed, expert = weights["head"], weights["fixed"], weights["expert"]
    active, tokens = weights["active_experts"], point["batch" if point["steps"] else "tokens"]
    touched = expected_experts(weights["experts"], active, tokens)
    products = fixed["products"] + active * expert["products"]
    return {
        "tokens_per_s": tokens / float(np.quantile(np.concatenate(rounds), quantile)),
        "experts_touched": touched,
        "weight_bytes": head["bytes"] + fixed["bytes"] + touched * expert["bytes"],
        "products_per_token": products + head["products"] * point["batch"] / tokens,
    }


def expected_experts(num_experts: int, active_experts: int, tokens: int) -> float:
    """Distinct experts a layer if tokens were routed independently and evenly: E (1 - (1 - k/E)^T).

    Example:
        >>> expected_experts(112, 28, 1), round(expected_experts(112, 28, 4), 1)
        (28.0, 76.6)
    """
    return num_experts * (1 - (1 - active_experts / max(1, num_experts)) ** tokens)


def ratio_quartiles(dense: Rounds, moe: Rounds) -> list[float]:
    """First and third quartile, over rounds, of how many times faster the MoE was in a round."""
    ratios = [np.median(a) / np.median(b) for a, b in zip(dense, moe, strict=True)]
    quartiles: list[float] = np.quantile(ratios, [0.25, 0.75]).tolist()
    return quartiles


def table(result: Values) -> Table:
    """What `bench` measured: a line for each point."""
    settings, models = result["settings"], []
    for label in ("dense", "moe"):
        about = result[label]["weights"]
        split = f", {about['active_experts']} of {about['experts']} experts" * (label == "moe")
        size = in_bytes(about["stored_bytes"])
        models.append(f"{result[label]['name']} ({result[label]['dtype']}, {size}{split})")

    def name(row: Values) -> str:
        point = row["point"]
        is_prefill = point["name"] == "prefill"
        return f"prefill {point['tokens']}" if is_prefill else f"decode x {point['batch']}"

    def both(row: Values) -> str:
        return " / ".join(in_bytes(row[side]["peak_bytes"]) for side in ("dense", "moe"))

    return table_of(
        result["points"],
        {
            "tokens/s" if settings["clock"] == "wall" else "tokens/CPU s": name,
            "dense": lambda row: f"{row['dense']['tokens_per_s']:,.1f}",
            "MoE": lambda row: f"{row['moe']['tokens_per_s']:,.1f}",
            "ratio": lambda row: f"{row['speed_ratio']:.2f}",
            "quartiles": lambda row: "{:.2f}-{:.2f}".format(*row["speed_ratio_quartiles"]),
            "ideal": lambda row: f"{row['ideal_ratio']:.2f}",
            "of ideal": lambda row: percent(row["share_of_ideal"]),
            "peak memory": both,
        },
        title=f"{result['runtime']} on {result['provenance']['hardware']}, {settings['threads']} "
        f"threads, {settings['rounds']} rounds in turns",
        note=f"dense: {models[0]}. MoE: {models[1]}. ratio: of the best steps; quartiles: "
        "over rounds, median times. ideal: bytes of weights read (decode), multiply-adds (prefill),"
        " dense / MoE. peak memory: of the process on a CPU, allocated on a GPU.",
    )
