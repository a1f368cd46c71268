"""Runs one model in a child process: prefill and decode, timed, with the memory they took."""

import copy
import random
import re
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from dotmoe.errors import UserError
from dotmoe.export import require_checksums
from dotmoe.files import Values
from dotmoe.llama_cpp import Runtime
from dotmoe.load import load_weights, resolved_dtype

WARM_UP_ROUNDS = 2
_CPU = torch.device("cpu")


def weights_of(tensors: Mapping[str, tuple[int, tuple[int, ...]]], active_experts: int) -> Values:
    """What a model must read and multiply for a token.

    Of a Mixture-of-Experts only the chosen experts count. Caches, activations and attention over
    the context are left out: they are the same in both models.

    Args:
        tensors: Bytes in memory and shape by name, of Transformers or GGUF.
        active_experts: k; 0 for a dense model.

    Returns:
        Shape of the `embedding`; `stored_bytes` of all tensors; `experts` (E) and `active_experts`
        (k) a layer; and `bytes` and `products` (multiply-adds a token) of the `head`, of what is
        `fixed`, and of one `expert` of every layer.
    """
    tied = next(name for name in tensors if re.search("embed_tokens|token_embd", name))
    head = next((name for name in ("lm_head.weight", "output.weight") if name in tensors), tied)
    routed = {name for name in tensors if re.search(r"\.experts\.|_exps\.", name)}
    routed |= {name for name, (_, shape) in tensors.items() if len(shape) == 3}  # those of heads
    experts = max((tensors[name][1][0] for name in routed), default=0)

    def used(names: Iterable[str], dims: int = 2, share: int = 1) -> Values:
        group = [tensors[name] for name in names]
        products = sum(prod(shape) for _, shape in group if len(shape) == dims)
        return {"bytes": sum(size for size, _ in group) // share, "products": products // share}

    return {
        "embedding": list(tensors[tied][1]),
        "stored_bytes": sum(size for size, _ in tensors.values()),
        "experts": experts,
        "active_experts": active_experts,
        "head": used([head]),
        "fixed": used(tensors.keys() - routed - {head, tied}),
        "expert": used(routed, 3, max(1, experts)),
    }


class Runner(ABC):
    """One model: `prepare` a point, then `run` it as often as wanted."""

    weights: Values
    dtype: str
    context: int

    def __init__(self, device: str, threads: int, clock: str, seed: int) -> None:
        self._now = time.process_time if clock == "cpu" else time.perf_counter
        self._device, self._threads, self._seed = torch.device(device), threads, seed
        self._tokens = self._steps = 0
        self._ids_BT: torch.Tensor

    def loaded(self) -> Values:
        """`weights` as `weights_of` gives them, the `dtype` of most, and the longest `context`."""
        return {"weights": self.weights, "dtype": self.dtype, "context": self.context}

    def prepare(self, batch: int, tokens: int, steps: int) -> None:
        """Fill the cache with so many tokens of each sequence, to decode `steps` more, and warm up.

        Without steps it is the tokens that are timed. Ids are drawn evenly, for both models alike.
        """
        forget_peak(self._device)
        self._tokens, self._steps = tokens, steps
        ids, count = range(self.weights["embedding"][0]), batch * (tokens + steps)
        drawn = random.Random(self._seed).choices(ids, k=count)
        self._ids_BT = torch.tensor(drawn, device=self._device).view(batch, -1)
        self._open()
        if steps:
            self._call(0, tokens)()
        for _ in range(WARM_UP_ROUNDS):
            self.run()

    def run(self) -> list[float]:
        """One round: seconds of each step. Every round starts from the same cache."""
        self._rewind(self._tokens if self._steps else 0)
        starts = range(self._tokens, self._tokens + self._steps)
        seconds = []
        for start, end in [(start, start + 1) for start in starts] or [(0, self._tokens)]:
            compute = self._call(start, end)
            began = self._now()
            compute()
            seconds.append(self._now() - began)
        return seconds

    def peak(self) -> int:
        """Largest memory since `prepare`, in bytes."""
        return peak_bytes(self._device)

    @abstractmethod
    def _open(self) -> None:
        """Make an empty cache."""

    @abstractmethod
    def _rewind(self, start: int) -> None:
        """Drop from the cache what lies at and after a position."""

    @abstractmethod
    def _call(self, start: int, end: int) -> Callable[[], None]:
        """What computes these positions of all sequences, and the logits of the last one."""


class TransformersRunner(Runner):
    """A checkpoint folder in stock Transformers, on a CPU or a GPU."""

    def __init__(self, path: str, dtype: str, *options: Any) -> None:
        super().__init__(*options)
        torch.set_num_threads(self._threads)
        model: Any = load_weights(Path(path), resolved_dtype(dtype, self._device))
        self._model = model.to(self._device)
        if getattr(model.config, "head_experts_per_tok", 0):
            raise UserError(
                f"{path} has experts of neurons and of heads, and a measurement has one k. "
                "Measure a run of either alone."
            )
        self.context = model.config.max_position_embeddings
        self.dtype = str(model.dtype).removeprefix("torch.")
        tensors = {name: (p.nbytes, tuple(p.shape)) for name, p in model.named_parameters()}
        self.weights = weights_of(tensors, getattr(model.config, "num_experts_per_tok", None) or 0)
        self._cache: Any = None
        self._filled: Any = None

    def _open(self) -> None:
        self._cache = self._filled = DynamicCache(config=self._model.config)

    def _rewind(self, start: int) -> None:
        if start == 0:
            self._open()
            return
        # A layer of a cache grows by making new tensors, so rounds share what they start from.
        self._cache = copy.copy(self._filled)
        self._cache.layers = [copy.copy(layer) for layer in self._filled.layers]

    def _call(self, start: int, end: int) -> Callable[[], None]:
        options = {"past_key_values": self._cache, "use_cache": True, "logits_to_keep": 1}

        @torch.inference_mode()
        def compute() -> None:
            self._model(input_ids=self._ids_BT[:, start:end], **options)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

        return compute


class LlamaRunner(Runner):
    """A GGUF file in llama.cpp, on a CPU; its number format is its own."""

    def __init__(self, path: str, dtype: str, *options: Any) -> None:
        from dotmoe.checkpoint.from_gguf import GgufFile  # an extra

        super().__init__(*options)
        file = GgufFile(Path(path))
        require_checksums(file.path.parent)
        self._runtime = Runtime(path, self._threads)
        tensors = {
            name: (int(tensor.n_bytes), tuple(int(size) for size in reversed(tensor.shape)))
            for name, tensor in file.tensors.items()
        }
        self.weights = weights_of(tensors, file.size("expert_used_count", 0))
        self.context = file.size("context_length")
        self.dtype = max(file.tensors.values(), key=lambda each: each.n_bytes).tensor_type.name

    def _open(self) -> None:
        self._runtime.open(self._tokens + self._steps, len(self._ids_BT), {})

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


def peak_bytes(device: torch.device = _CPU) -> int:
    """Most memory that was held since `forget_peak`, or since the start if it cannot forget."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS: bytes
    found = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def forget_peak(device: torch.device = _CPU) -> None:
    """Let the peak start again from what is held now, where the system allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
