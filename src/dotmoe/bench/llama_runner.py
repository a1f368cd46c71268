"""Runs a GGUF file in llama.cpp by its low-level interface: sequences in parallel, one thread pool.

Of `llama_cpp` no more is used than the functions of llama.cpp itself.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from dotmoe.bench.gguf_weights import gguf_header
from dotmoe.bench.points import LoadedModel, Point, WorkerSetup, random_tokens
from dotmoe.bench.process_memory import forget_peak, peak_bytes, resident_bytes
from dotmoe.errors import UserError

WARM_UP_ROUNDS = 2
MOST_PER_CALL = 512
"""Tokens of one call while a cache is filled; llama.cpp's own default of a batch it computes."""


def llama_library() -> ModuleType:
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
    module: ModuleType = llama_cpp
    return module


class LlamaRunner:
    """See `Runner`."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._lib: Any = llama_library()
        self._header = gguf_header(Path(setup.path))
        # Kept, since llama.cpp holds a pointer to it.
        self._silence = self._lib.llama_log_callback(lambda level, text, data: None)
        self._model: Any = None
        self._context: Any = None
        self._point: Point | None = None
        self._tokens: list[int] = []

    def load(self) -> LoadedModel:
        """See `Runner.load`."""
        lib = self._lib
        lib.llama_log_set(self._silence, ctypes.c_void_p(0))
        lib.llama_backend_init()
        before = resident_bytes()
        settings = lib.llama_model_default_params()
        settings.n_gpu_layers = 0
        settings.use_extra_bufts = self._setup.repack
        self._model = lib.llama_model_load_from_file(self._setup.path.encode(), settings)
        if not self._model:
            raise UserError(f"llama.cpp cannot load {self._setup.path}. Write the file again.")
        return LoadedModel(
            weights=self._header.weights,
            dtype=self._header.kind,
            before_bytes=before,
            loading_peak_bytes=peak_bytes(),
        )

    def prepare(self, point: Point) -> float | None:
        """See `Runner.prepare`."""
        forget_peak()
        self._point = point
        self._context = self._new_context(point)
        after = point.steps if point.name == "decode" else 0
        count = point.batch * (point.tokens + after)
        self._tokens = random_tokens(self._header.vocabulary, count, self._setup.seed)
        if point.name == "decode":
            for sequence in range(point.batch):
                for start in range(0, point.tokens, MOST_PER_CALL):
                    end = min(start + MOST_PER_CALL, point.tokens)
                    self._decode([(sequence, at, False) for at in range(start, end)])
        for _ in range(WARM_UP_ROUNDS):
            self.run()
        return None

    def run(self) -> list[float]:
        """See `Runner.run`."""
        point, lib = self._point, self._lib
        assert point is not None
        memory = lib.llama_get_memory(self._context)
        seconds = []
        for step in range(point.steps):
            if point.name == "prefill":
                lib.llama_memory_clear(memory, True)
                items = [(0, at, at == point.tokens - 1) for at in range(point.tokens)]
            else:
                items = [(s, point.tokens + step, True) for s in range(point.batch)]
            seconds.append(self._decode(items))
        if point.name == "decode":
            for sequence in range(point.batch):
                lib.llama_memory_seq_rm(memory, sequence, point.tokens, -1)
        return seconds

    def finish(self) -> int:
        """See `Runner.finish`."""
        peak = peak_bytes()
        self._lib.llama_free(self._context)
        self._context = self._point = None
        return peak

    def _new_context(self, point: Point) -> Any:
        lib = self._lib
        length = point.tokens + (point.steps if point.name == "decode" else 0)
        settings = lib.llama_context_default_params()
        settings.n_ctx = point.batch * length
        settings.n_batch = max(MOST_PER_CALL, point.tokens_per_step)
        settings.n_seq_max = point.batch
        settings.n_threads = settings.n_threads_batch = self._setup.threads
        context = lib.llama_init_from_model(self._model, settings)
        if not context:
            raise UserError(
                f"llama.cpp has no room for {point.batch} sequences of {length} tokens. "
                "Lower batch_sizes or context_tokens."
            )
        return context

    def _decode(self, items: Sequence[tuple[int, int, bool]]) -> float:
        """Compute (sequence, position, logits wanted) items in one call; gives its seconds."""
        assert self._point is not None
        lib = self._lib
        length = len(self._tokens) // self._point.batch
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
