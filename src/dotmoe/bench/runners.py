"""Runs one model in a child process: prefill and decode, timed, with the memory they took.

One point at a time: `prepare`, `run` as often as wanted, `finish`.
"""

import copy
import ctypes
import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from dotmoe.bench.work import Work, expert_modules
from dotmoe.errors import UserError
from dotmoe.load import load_weights, resolved_dtype

WARM_UP_ROUNDS = 2
MOST_PER_CALL = 512
"""Tokens of one call while a cache is filled; llama.cpp's own default of a batch it computes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One thing to time."""

    name: Literal["prefill", "decode"]
    batch: int
    """Sequences at once (B); 1 for prefill."""
    tokens: int
    """Prefill: length of the prompt. Decode: tokens of each sequence in the cache at the start."""
    steps: int
    """Timed steps a round; a step is a whole prompt, or one token of each sequence."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens that a step computes."""
        return self.tokens if self.name == "prefill" else self.batch

    @property
    def length(self) -> int:
        """Tokens of a sequence at the end of a round."""
        return self.tokens + (self.steps if self.name == "decode" else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """One model, and how its process runs it."""

    path: str
    """Checkpoint folder, or GGUF file."""
    device: str
    dtype: str
    """As in `LoadConfig`; a GGUF file has its own."""
    threads: int
    clock: Literal["wall", "cpu"]
    seed: int

    def now(self) -> float:
        """Seconds on the clock."""
        return time.process_time() if self.clock == "cpu" else time.perf_counter()

    def tokens(self, vocabulary: int, point: Point) -> list[int]:
        """Token ids of a point's sequences, drawn evenly; the same arguments give the same ids."""
        count = point.batch * point.length
        return random.Random(self.seed).choices(range(vocabulary), k=count)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A model in a process of its own."""

    weights: Work
    dtype: str
    """Of most weights, as they are held."""


class TransformersRunner:
    """A checkpoint folder in stock Transformers, on a CPU or a GPU."""

    def __init__(self, setup: Setup) -> None:
        self._setup, self._device = setup, torch.device(setup.device)
        self._model: Any = None
        self._point: Point
        self._cache: Any = None
        self._inputs: Tensor

    def load(self) -> Loaded:
        """Load the model, once."""
        torch.set_num_threads(self._setup.threads)
        dtype = resolved_dtype(self._setup.dtype, self._device)
        self._model = load_weights(Path(self._setup.path), dtype).to(self._device)
        return Loaded(
            weights=Work.of_model(self._model),
            dtype=str(self._model.dtype).removeprefix("torch."),
        )

    @torch.inference_mode()
    def prepare(self, point: Point) -> float | None:
        """Fill caches and warm up.

        Returns:
            Distinct experts a split layer that ran in a step, mean over steps and layers; None for
            a dense model.
        """
        forget_peak(self._device)
        self._point = point
        ids = self._setup.tokens(self._model.config.vocab_size, point)
        self._inputs = torch.tensor(ids, device=self._device).view(point.batch, point.length)
        if point.name == "decode":
            self._cache = DynamicCache(config=self._model.config)
            self._seconds(self._inputs[:, : point.tokens], self._cache)
            self._inputs = self._inputs[:, point.tokens :]
        with counted_experts(self._model) as touched:
            self.run()
        for _ in range(WARM_UP_ROUNDS - 1):
            self.run()
        return sum(touched) / len(touched) if touched else None

    @torch.inference_mode()
    def run(self) -> list[float]:
        """One round: seconds of each step. Every round starts from the same cache."""
        if self._point.name == "prefill":
            return [self._seconds(self._inputs, DynamicCache(config=self._model.config))]
        # A layer of the cache grows by making new tensors, so that rounds share what they start
        # from.
        cache = copy.copy(self._cache)
        cache.layers = [copy.copy(layer) for layer in self._cache.layers]
        return [self._seconds(ids_B1, cache) for ids_B1 in torch.split(self._inputs, 1, dim=1)]

    def finish(self) -> int:
        """Drop the cache; gives the largest memory since `prepare`, in bytes."""
        self._cache = None
        return peak_bytes(self._device)

    def _seconds(self, ids_BT: Tensor, cache: Any) -> float:
        self._wait()
        start = self._setup.now()
        self._model(input_ids=ids_BT, past_key_values=cache, use_cache=True, logits_to_keep=1)
        self._wait()
        return self._setup.now() - start

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class LlamaRunner:
    """A GGUF file in llama.cpp by its low-level interface, which decodes sequences in parallel."""

    def __init__(self, setup: Setup) -> None:
        from dotmoe.export.gguf_file import GgufFile

        self._setup, self._lib = setup, llama_library()
        self._file = GgufFile(Path(setup.path))
        # Kept, since llama.cpp holds a pointer to it.
        self._silence = self._lib.llama_log_callback(lambda level, text, data: None)
        self._model: Any = None
        self._context: Any = None
        self._point: Point
        self._tokens: list[int] = []

    def load(self) -> Loaded:
        """See `TransformersRunner.load`."""
        lib = self._lib
        lib.llama_log_set(self._silence, ctypes.c_void_p(0))
        lib.llama_backend_init()
        settings = lib.llama_model_default_params()
        settings.n_gpu_layers = 0
        if hasattr(
            settings, "use_extra_bufts"
        ):  # weights as stored: both models in the same kernels
            settings.use_extra_bufts = False
        self._model = lib.llama_model_load_from_file(self._setup.path.encode(), settings)
        if not self._model:
            raise UserError(f"llama.cpp cannot load {self._setup.path}. Write the file again.")
        return Loaded(
            weights=Work.of_gguf(self._file),
            dtype=self._file.most_bytes_in,
        )

    def prepare(self, point: Point) -> None:
        """See `TransformersRunner.prepare`; llama.cpp does not tell which experts ran."""
        forget_peak()
        self._point = point
        self._tokens = self._setup.tokens(self._file.shape("token_embd.weight")[0], point)
        settings = self._lib.llama_context_default_params()
        settings.n_ctx = point.batch * point.length
        settings.n_batch = max(MOST_PER_CALL, point.tokens_per_step)
        settings.n_seq_max = point.batch
        settings.n_threads = settings.n_threads_batch = self._setup.threads
        self._context = self._lib.llama_init_from_model(self._model, settings)
        if not self._context:
            raise UserError(
                f"llama.cpp has no room for {point.batch} sequences of {point.length} tokens. "
                "Lower batch_sizes or context_tokens."
            )
        if point.name == "decode":
            for sequence in range(point.batch):
                for start in range(0, point.tokens, MOST_PER_CALL):
                    end = min(start + MOST_PER_CALL, point.tokens)
                    self._seconds([(sequence, at, False) for at in range(start, end)])
        for _ in range(WARM_UP_ROUNDS):
            self.run()

    def run(self) -> list[float]:
        """See `TransformersRunner.run`."""
        point, lib = self._point, self._lib
        memory = lib.llama_get_memory(self._context)
        if point.name == "prefill":
            lib.llama_memory_clear(memory, True)
            last = point.tokens - 1
            return [self._seconds([(0, at, at == last) for at in range(point.tokens)])]
        sequences = range(point.batch)
        seconds = [
            self._seconds([(sequence, at, True) for sequence in sequences])
            for at in range(point.tokens, point.length)
        ]
        for sequence in sequences:
            lib.llama_memory_seq_rm(memory, sequence, point.tokens, -1)
        return seconds

    def finish(self) -> int:
        """See `TransformersRunner.finish`."""
        peak = peak_bytes()
        self._lib.llama_free(self._context)
        return peak

    def _seconds(self, items: Sequence[tuple[int, int, bool]]) -> float:
        """Compute (sequence, position, logits wanted) items in one call; gives its seconds."""
        lib, length = self._lib, self._point.length
        batch = lib.llama_batch_init(len(items), 0, 1)
        batch.n_tokens = len(items)
        for at, (sequence, position, wanted) in enumerate(items):
            batch.token[at] = self._tokens[sequence * length + position]
            batch.pos[at] = position
            batch.n_seq_id[at] = 1
            batch.seq_id[at][0] = sequence
            batch.logits[at] = wanted
        start = self._setup.now()
        status = lib.llama_decode(self._context, batch)
        lib.llama_synchronize(self._context)
        seconds = self._setup.now() - start
        lib.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode gave status {status} for {self._point}")
        return seconds


def llama_library() -> Any:
    """The bindings of llama.cpp.

    Raises:
        UserError: They are not installed, or do not load on this machine.
    """
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError) as error:
        raise UserError(
            f"llama-cpp-python is not usable ({error}), and only it runs GGUF files here. "
            "Run pip install 'dotmoe[llama-cpp]', which compiles it, or give checkpoint folders."
        ) from error
    return llama_cpp


@contextmanager
def counted_experts(model: nn.Module) -> Iterator[list[int]]:
    """Collects how many distinct experts each split layer runs, in order of the calls."""
    touched: list[int] = []

    def count(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        chosen_TK = arguments[1] if len(arguments) > 1 else named["top_k_index"]
        touched.append(int(chosen_TK.unique().numel()))

    handles = [
        module.register_forward_pre_hook(count, with_kwargs=True)
        for module in expert_modules(model)
    ]
    try:
        yield touched
    finally:
        for handle in handles:
            handle.remove()


_CPU = torch.device("cpu")


def peak_bytes(device: torch.device = _CPU) -> int:
    """Most memory that was held since `forget_peak`, or since the start if it cannot forget."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if not status.exists():
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS: bytes
    found = re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text(encoding="utf-8"), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def forget_peak(device: torch.device = _CPU) -> None:
    """Let the peak start again from what is held now, where the system allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
