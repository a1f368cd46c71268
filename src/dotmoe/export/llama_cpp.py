"""llama.cpp through llama-cpp-python: logits and tokens of a GGUF file."""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dotmoe.common.errors import UserError
from dotmoe.common.worker import Worker

if TYPE_CHECKING:  # the child process does not import torch
    import numpy as np
    from jaxtyping import Float, Int
    from torch import Tensor


def is_installed() -> bool:
    """Whether llama-cpp-python is installed; it is not imported."""
    return importlib.util.find_spec("llama_cpp") is not None


class LlamaCppModel(Worker):
    """A GGUF file in llama.cpp on the CPU, in its own process; use it in a `with` block."""

    def __init__(self, path: Path, *, context: int) -> None:
        """Load a file for texts of up to `context` tokens."""
        import torch

        name, threads = f"llama.cpp on {path}", torch.get_num_threads()
        target, remedy = "dotmoe.export.llama_cpp:LlamaCppRuntime", "Export the file again."
        super().__init__(target, str(path), threads, name=name, remedy=remedy)
        # Keys and values in float32 and plain attention, as Transformers computes.
        self.ask("open", context, 1, {"type_k": 0, "type_v": 0, "flash_attn_type": 0})

    def logits(self, tokens_T: "Int[Tensor, ' T']") -> "Float[Tensor, 'T V']":
        """Logits of every token of one text that fits into the context; texts are independent."""
        import torch

        return torch.from_numpy(self.ask("logits", tokens_T.tolist()))

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text; the names of special tokens in it become those tokens."""
        return list(self.ask("tokenize", text))


class LlamaCppRuntime:
    """A GGUF file in llama.cpp's low-level interface; runs in the child process."""

    def __init__(self, path: str, threads: int) -> None:
        try:
            self.lib: Any = importlib.import_module("llama_cpp")
        except (ImportError, OSError, RuntimeError) as error:
            raise UserError(
                f"llama-cpp-python is not usable ({error}), but running a GGUF needs it. "
                "Run pip install -e '.[llama-cpp]' in the checkout; it compiles llama.cpp."
            ) from error
        self._threads = threads
        self.context: Any = None
        self.lib.llama_backend_init()
        settings = self.lib.llama_model_default_params()
        settings.n_gpu_layers = 0
        settings.use_extra_bufts = False  # keep weights as stored; the AMX kernels crashed
        self._model = self.lib.llama_model_load_from_file(path.encode(), settings)
        if not self._model:
            raise RuntimeError("llama.cpp cannot load the file")
        self._vocabulary = self.lib.llama_model_get_vocab(self._model)

    def version(self) -> str:
        """Version of llama-cpp-python."""
        return str(self.lib.__version__)

    def open(self, tokens: int, sequences: int, options: dict[str, Any]) -> None:
        """Create a context for `sequences` of `tokens` each; the previous context is dropped."""
        if self.context:
            self.lib.llama_free(self.context)
        settings = self.lib.llama_context_default_params()
        settings.n_ctx = settings.n_batch = tokens * sequences
        settings.n_seq_max = sequences
        settings.n_threads = settings.n_threads_batch = self._threads
        for name, value in options.items():
            setattr(settings, name, value)
        self.context = self.lib.llama_init_from_model(self._model, settings)
        if not self.context:
            raise RuntimeError(f"no room for {sequences} sequences of {tokens} tokens")

    def forget(self, sequence: int, start: int) -> None:
        """Drop a sequence's cache from position `start` on."""
        self.lib.llama_memory_seq_rm(self.lib.llama_get_memory(self.context), sequence, start, -1)

    def call(self, items: Sequence[tuple[int, int, int, bool]]) -> Callable[[], None]:
        """Return a function that computes tokens: (id, position, sequence, whether with logits)."""
        batch = self.lib.llama_batch_init(len(items), 0, 1)
        batch.n_tokens = len(items)
        for at, (token, position, sequence, wanted) in enumerate(items):
            batch.token[at], batch.pos[at], batch.logits[at] = token, position, wanted
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence

        def compute() -> None:
            status = self.lib.llama_decode(self.context, batch)
            self.lib.llama_synchronize(self.context)
            self.lib.llama_batch_free(batch)
            if status:
                raise RuntimeError(f"llama_decode returned status {status} for {len(items)} tokens")

        return compute

    def logits(self, tokens: list[int]) -> "np.ndarray":
        """Logits of every token of one text, [T, V]."""
        import numpy as np

        self.forget(0, 0)
        self.call([(token, at, 0, True) for at, token in enumerate(tokens)])()
        shape = len(tokens), self.lib.llama_vocab_n_tokens(self._vocabulary)
        return np.array(np.ctypeslib.as_array(self.lib.llama_get_logits(self.context), shape))

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text."""
        raw = text.encode()
        ids = (self.lib.llama_token * (3 * len(raw) + 8))()  # a byte is at most 3 tokens
        count = self.lib.llama_tokenize(self._vocabulary, raw, len(raw), ids, len(ids), True, True)
        return list(ids[:count])
