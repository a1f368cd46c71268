"""`dotmoe bench`: the speed of a dense model and of its MoE."""

import copy
import math
import random
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from dotmoe.common.device import resolved_device
from dotmoe.common.errors import UserError
from dotmoe.common.files import Values, expanded, read_json, require_writable
from dotmoe.common.options import checked
from dotmoe.common.progress import Update, no_update
from dotmoe.common.tables import Table, in_bytes, table_of
from dotmoe.common.worker import Worker
from dotmoe.export.llama_cpp import LlamaCppRuntime
from dotmoe.export.record import require_checksums
from dotmoe.measure.config import BenchConfig, in_context
from dotmoe.measure.evaluate.models import context_of, gguf_file, loaded, model_folder
from dotmoe.models.config import LoadConfig, is_gguf
from dotmoe.models.experts_on_cpu import use_stock
from dotmoe.models.hooks import cache_arguments
from dotmoe.models.identity import FINGERPRINT, fingerprint
from dotmoe.run.provenance import provenance

PROTOCOL = (
    "Both models, each in its own process, are warmed up at each point and take turns in "
    "alternating order; every round starts from the same cache, with tokens drawn uniformly from "
    "the vocabulary. Speeds and their ratio use the 0.1 quantile of the times of all steps."
)

QUANTILE = 0.1
"""Quantile of the times of all steps that gives a speed: low, because machines are busy."""

Rounds = Sequence[Sequence[float]]
"""Seconds of each step, by round."""


def bench(config: BenchConfig, on_progress: Update = no_update) -> Values:
    """Measure both models in turns; both are in memory at once, each in its own process.

    `on_progress` is called with the rounds done, the total number of rounds and the point.

    Returns JSON values: both models, every point of both, ratios, settings and provenance. Raises a
    `UserError` if the two are not a dense model and its MoE, or not for the same software; if there
    is no such model or device, or no llama.cpp; if the context is too long, or memory too small.
    """
    config = _with_gguf_files(checked(config))
    if config.out is not None:
        _require_place(expanded(config.out), config)
    in_gguf = is_gguf(Path(config.moe))
    threads = config.threads or torch.get_num_threads()
    device = "cpu" if in_gguf else str(resolved_device(config.load.device))
    _require_clock(config, threads, device)
    runtime = "llama.cpp" if in_gguf else "transformers"
    runner = LlamaRunner if in_gguf else TransformersRunner
    names = (config.dense, config.moe)
    paths = [expanded(name) if in_gguf else model_folder(name) for name in names]
    _require_context(config, min(map(context_of, paths)))
    with ExitStack() as stack:
        workers = []
        for path in paths:
            worker = Worker(
                f"{runner.__module__}:{runner.__name__}",
                str(path),
                config.load.dtype,
                device,
                threads,
                config.clock,
                config.seed,
                name=f"{runtime} on {path}",
                remedy="If memory ran out, lower batch_sizes, prompt_tokens or context_tokens.",
            )
            workers.append(stack.enter_context(worker))
        models = [worker.ask("loaded") for worker in workers]
        _require_a_pair(config, *models)
        points = _measured(config, workers, on_progress)
    origin = provenance(config.seed, device) | {"threads": threads}
    if in_gguf:
        origin["versions"]["llama_cpp_python"] = version("llama_cpp_python")
    return {
        "origin": "measured",
        "protocol": PROTOCOL,
        "runtime": runtime,
        "dense": {"name": config.dense, FINGERPRINT: fingerprint(paths[0]), **models[0]},
        "moe": {"name": config.moe, FINGERPRINT: fingerprint(paths[1]), **models[1]},
        "points": points,
        "break_even": break_even(points),
        "settings": asdict(config) | {"threads": threads, "device": device},
        "provenance": origin,
    }


def _with_gguf_files(config: BenchConfig) -> BenchConfig:
    """The options, with the GGUF file in place of its folder; both models must run alike."""
    dense, moe = (str(gguf_file(Path(name)) or name) for name in (config.dense, config.moe))
    if is_gguf(Path(moe)) and not is_gguf(Path(dense)):
        raise UserError(
            f"{moe} is a GGUF file and {dense} is not, but both must run in the same "
            "software. Give two GGUF files or two checkpoints."
        )
    return replace(config, dense=dense, moe=moe)


def _require_place(file: Path, config: BenchConfig) -> None:
    """Refuse a file that cannot be written, or that is anything but a result of this pair."""
    require_writable(file)
    if not file.exists():
        return
    try:
        found = read_json(file)
        names = [found[side]["name"] for side in ("dense", "moe")]
    except (UserError, KeyError, TypeError):
        raise UserError(
            f"{file} exists and is no result of bench. Name another file, or delete it."
        ) from None
    if list(map(_place, names)) != [_place(config.dense), _place(config.moe)]:
        raise UserError(
            f"{file} is a result of {' and '.join(names)}, another pair. Name another file, or "
            "delete it."
        )


def _place(name: str) -> Path:
    """Where a model lies, however its name is spelt."""
    return expanded(name).resolve()


def _require_clock(config: BenchConfig, threads: int, device: str) -> None:
    """Refuse the clock of a process where it does not tell how long a step takes."""
    if config.clock == "cpu" and (threads > 1 or device != "cpu"):
        raise UserError(
            f"clock is cpu with {threads} threads on {device}, but it adds up all threads and "
            "ignores GPUs. Set threads to 1 and device to cpu, or clock to wall."
        )


def _require_a_pair(config: BenchConfig, dense: Values, moe: Values) -> None:
    first, second = dense["weights"], moe["weights"]
    if not first["experts"] and not second["experts"]:
        raise UserError(
            f"{config.moe} is a dense model, and so is {config.dense}: there is no MoE. "
            "Give a dense model, then the MoE that was made from it."
        )
    if first["experts"] or not second["experts"] or first["embedding"] != second["embedding"]:
        raise UserError(
            f"{config.dense} has {first['experts']} experts per layer and an embedding "
            f"{first['embedding']}, {config.moe} {second['experts']} and {second['embedding']}. "
            "Give a dense model, then the MoE that was made from it."
        )


def _require_context(config: BenchConfig, context: int) -> None:
    """Refuse more tokens than both models can see at once."""
    in_context("prompt_tokens", config.prompt_tokens, context, least=0)
    decoded = max(config.context_tokens, default=0) + config.decode_steps
    in_context("context_tokens + decode_steps", decoded, context)


def _measured(config: BenchConfig, workers: list[Worker], on_progress: Update) -> list[Values]:
    """Speeds of both models at each point, from rounds in turns."""
    total = config.rounds * len(config.points)
    done = 0
    results = []
    for point in config.points:
        note = f"{point['name']}, batch {point['batch']}"
        on_progress(done, total, note)
        for worker in workers:
            worker.ask("prepare", point["batch"], point["tokens"], point["steps"])
        rounds: list[list[list[float]]] = [[], []]
        for turn in range(config.rounds):
            sides = [0, 1]
            if turn % 2 == 1:
                sides.reverse()
            for side in sides:
                rounds[side].append(workers[side].ask("run"))
            done += 1
            on_progress(done, total, note)
        is_decoding = point["steps"] > 0
        tokens = point["batch"] if is_decoding else point["tokens"]
        dense, moe = (_tokens_per_s(tokens, seconds) for seconds in rounds)
        results.append(
            {
                "point": point,
                "dense": {"tokens_per_s": dense},
                "moe": {"tokens_per_s": moe},
                "speed_ratio": moe / dense,
                "speed_ratio_quartiles": ratio_quartiles(*rounds),
            }
        )
    return results


def _tokens_per_s(tokens: int, seconds: Rounds) -> float:
    """Tokens per second of the fastest steps, of so many tokens each."""
    return tokens / float(np.quantile(np.concatenate(seconds), QUANTILE))


def ratio_quartiles(dense: Rounds, moe: Rounds) -> list[float]:
    """First and third quartile, over rounds, of the MoE's speedup in a round."""
    ratios = [np.median(a) / np.median(b) for a, b in zip(dense, moe, strict=True)]
    quartiles: list[float] = np.quantile(ratios, [0.25, 0.75]).tolist()
    return quartiles


def break_even(points: Sequence[Values]) -> list[str]:
    """Where the MoE is faster than the dense model and where not, a sentence for each context.

    It is faster at a batch if its ratio and both quartiles of its speedup over rounds exceed 1,
    slower if all are below 1, else the batch is inconclusive. Between two batches with speedups on
    both sides of 1, the batch that breaks even is interpolated in logarithms.
    """
    contexts = dict[tuple[str, int], list[Values]]()
    for row in points:
        contexts.setdefault((row["point"]["name"], row["point"]["tokens"]), []).append(row)
    return [
        f"{name}, {tokens:,} tokens: the MoE is {_where_faster(rows)}"
        for (name, tokens), rows in contexts.items()
    ]


def _where_faster(rows: list[Values]) -> str:
    """The batches of one context at which the MoE is faster, slower or neither."""
    rows = sorted(rows, key=lambda row: int(row["point"]["batch"]))
    batches: dict[str, list[str]] = {"faster": [], "slower": [], "inconclusive": []}
    for row in rows:
        batches[_verdict(row)].append(str(row["point"]["batch"]))
    parts = [f"{verdict} at batch {', '.join(at)}" for verdict, at in batches.items() if at]
    for smaller, larger in pairwise(rows):
        if (smaller["speed_ratio"] > 1) != (larger["speed_ratio"] > 1):
            parts.append(f"even at about {_even_batch(smaller, larger):.3g}, interpolated")
    return "; ".join(parts)


def _even_batch(smaller: Values, larger: Values) -> float:
    """The batch between two at which both models are as fast, interpolated in logarithms."""
    first, second = math.log(smaller["speed_ratio"]), math.log(larger["speed_ratio"])
    growth = larger["point"]["batch"] / smaller["point"]["batch"]
    return float(smaller["point"]["batch"] * growth ** (first / (first - second)))


def _verdict(row: Values) -> str:
    """Whether the MoE is faster or slower at a point, if its ratio and both quartiles say so."""
    said = (row["speed_ratio"], *row["speed_ratio_quartiles"])
    if min(said) > 1:
        return "faster"
    if max(said) < 1:
        return "slower"
    return "inconclusive"


def table(result: Values) -> Table:
    """Table of a result of `bench`, with one row for each point."""
    settings = result["settings"]
    models = []
    for label in ("dense", "moe"):
        about = result[label]["weights"]
        split = ""
        if label == "moe":
            split = f", {about['active_experts']} of {about['experts']} experts"
        size = in_bytes(about["stored_bytes"])
        models.append(f"{result[label]['name']} ({result[label]['dtype']}, {size}{split})")

    def name(row: Values) -> str:
        point = row["point"]
        if not point["steps"]:
            return f"prefill {point['tokens']}"
        return f"decode x {point['batch']}, {point['tokens']:,} before"

    return table_of(
        result["points"],
        {
            "tokens/s" if settings["clock"] == "wall" else "tokens/CPU s": name,
            "dense": lambda row: f"{row['dense']['tokens_per_s']:,.1f}",
            "MoE": lambda row: f"{row['moe']['tokens_per_s']:,.1f}",
            "ratio": lambda row: f"{row['speed_ratio']:.2f}",
            "quartiles": lambda row: "{:.2f}-{:.2f}".format(*row["speed_ratio_quartiles"]),
        },
        title=f"{result['runtime']} on {result['provenance']['hardware']}, threads: "
        f"{settings['threads']}, rounds in turns: {settings['rounds']}",
        note=f"dense: {models[0]}. MoE: {models[1]}. ratio: of the fastest steps; quartiles: of "
        f"median times over rounds. Break-even: {'. '.join(break_even(result['points']))}.",
    )


def weights_of(tensors: Mapping[str, tuple[int, Sequence[int]]], active_experts: int) -> Values:
    """What identifies a model and its MoE, from tensors of Transformers or GGUF.

    `tensors` maps a name to bytes in memory and shape; `active_experts` is k, 0 for a dense model.

    Returns:
        Shape of the `embedding`; `stored_bytes` of all tensors; `experts` (E) and `active_experts`
        (k) per layer.
    """
    embedding = next(name for name in tensors if re.search("embed_tokens|token_embd", name))
    stacked = [  # experts; the kernel of a convolution has three dimensions, too
        shape[0] for name, (_, shape) in tensors.items() if len(shape) == 3 and "conv" not in name
    ]
    return {
        "embedding": list(tensors[embedding][1]),
        "stored_bytes": sum(size for size, _ in tensors.values()),
        "experts": max(stacked, default=0),
        "active_experts": active_experts,
    }


class Runner(ABC):
    """One model to measure: `prepare` a point, then call `run` once for each round."""

    weights: Values
    dtype: str
    context: int
    _ids_BT: torch.Tensor
    _spans: list[tuple[int, int]]
    """Start and end of the positions that each step of a round computes."""

    def __init__(self, device: str, threads: int, clock: str, seed: int) -> None:
        self._now = time.process_time if clock == "cpu" else time.perf_counter
        self._device = torch.device(device)
        self._threads = threads
        self._seed = seed

    def loaded(self) -> Values:
        """The model's `weights` (see `weights_of`), the `dtype` of most, and longest `context`."""
        return {"weights": self.weights, "dtype": self.dtype, "context": self.context}

    def prepare(self, batch: int, tokens: int, steps: int) -> None:
        """Fill the cache with `tokens` of each sequence, to decode `steps` more, and warm up.

        With 0 steps, prefill of the tokens is timed. Ids are uniform, the same for both models.
        """
        vocabulary = range(self.weights["embedding"][0])
        drawn = random.Random(self._seed).choices(vocabulary, k=batch * (tokens + steps))
        self._ids_BT = torch.tensor(drawn, device=self._device).view(batch, -1)
        decoded = [(at, at + 1) for at in range(tokens, tokens + steps)]
        self._spans = decoded or [(0, tokens)]
        self._open()
        if decoded:
            self._call(0, tokens)()
        for _ in range(2):  # to warm up
            self.run()

    def run(self) -> list[float]:
        """Run a round and return the seconds of each step; all rounds start from one cache."""
        seconds = []
        self._rewind(self._spans[0][0])
        for span in self._spans:
            compute = self._call(*span)
            began = self._now()
            compute()
            seconds.append(self._now() - began)
        return seconds

    @abstractmethod
    def _open(self) -> None:
        """Make an empty cache."""

    @abstractmethod
    def _rewind(self, start: int) -> None:
        """Drop everything at and after position `start` from the cache."""

    @abstractmethod
    def _call(self, start: int, end: int) -> Callable[[], None]:
        """Return a function that computes these positions, with the logits of the last one."""


class TransformersRunner(Runner):
    """A checkpoint folder in stock Transformers, on a CPU or a GPU."""

    def __init__(self, path: str, dtype: str, *options: Any) -> None:
        super().__init__(*options)
        torch.set_num_threads(self._threads)
        load: Any = {"dtype": dtype, "device": str(self._device)}
        stock = loaded(Path(path), LoadConfig(**load))
        self._model = model = stock.model
        use_stock(model)
        if getattr(model.config, "head_experts_per_tok", 0):
            raise UserError(
                f"{path} has experts of neurons and of heads, but a measurement has only one k. "
                "Measure a run that splits only one of them."
            )
        self.context = stock.context
        self.dtype = stock.dtype
        tensors = {name: (p.nbytes, tuple(p.shape)) for name, p in model.named_parameters()}
        self.weights = weights_of(tensors, getattr(model.config, "num_experts_per_tok", None) or 0)

    def _open(self) -> None:
        self._cache = self._filled = DynamicCache(config=self._model.config)

    def _rewind(self, start: int) -> None:
        if start == 0:
            self._open()
            return
        # A cache layer grows by creating new tensors, so rounds can share their initial cache.
        self._cache = copy.copy(self._filled)
        self._cache.layers = [copy.copy(layer) for layer in self._filled.layers]

    def _call(self, start: int, end: int) -> Callable[[], None]:
        options = cache_arguments(self._cache) | {"logits_to_keep": 1}

        @torch.inference_mode()
        def compute() -> None:
            self._model(input_ids=self._ids_BT[:, start:end], **options)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

        return compute


class LlamaRunner(Runner):
    """A GGUF file in llama.cpp, on a CPU, in the file's own number format."""

    def __init__(self, path: str, dtype: str, *options: Any) -> None:
        from dotmoe.models.from_gguf import GgufFile  # optional dependency

        super().__init__(*options)
        file = GgufFile(Path(path))
        require_checksums(file.path.parent)
        self._runtime = LlamaCppRuntime(path, self._threads)
        tensors = {
            name: (int(tensor.n_bytes), tuple(int(size) for size in reversed(tensor.shape)))
            for name, tensor in file.tensors.items()
        }
        self.weights = weights_of(tensors, file.size("expert_used_count", 0))
        self.context = file.size("context_length")
        self.dtype = max(file.tensors.values(), key=lambda each: each.n_bytes).tensor_type.name

    def _open(self) -> None:
        sequences, tokens = self._ids_BT.shape
        self._runtime.open(tokens, sequences, {})

    def _rewind(self, start: int) -> None:
        for sequence in range(len(self._ids_BT)):
            self._runtime.forget(sequence, start)

    def _call(self, start: int, end: int) -> Callable[[], None]:
        return self._runtime.call(
            [
                (token, at, sequence, at == end - 1)
                for sequence, row in enumerate(self._ids_BT[:, start:end].tolist())
                for at, token in enumerate(row, start)
            ]
        )
