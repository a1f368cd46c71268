"""llama.cpp by way of llama-cpp-python: logits, perplexity and greedy text of a GGUF."""

import importlib.util
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Literal, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dotmoe.data import Packed
from dotmoe.errors import UserError
from dotmoe.evaluate.perplexity import EvaluateConfig, PerplexityResult, packed_perplexity

_WORKER = Path(__file__).with_name("llama_cpp_worker.py")

_CACHE_TYPES = {"f32": 0, "f16": 1}
"""`GGML_TYPE_F32` and `GGML_TYPE_F16`."""


def is_installed() -> bool:
    """Whether llama-cpp-python is there; nothing of it is loaded."""
    return importlib.util.find_spec("llama_cpp") is not None


class LlamaCppModel:
    """A GGUF held by llama.cpp on the CPU, in a process of its own.

    llama.cpp ends its process on a file it does not like and on a processor that cannot do what it
    promises; here that becomes an error. Use it in a `with` block.
    """

    def __init__(
        self,
        path: Path,
        *,
        context: int,
        threads: int | None = None,
        cache: Literal["f32", "f16"] = "f32",
        repack: bool = False,
    ) -> None:
        """Load a file.

        Args:
            path: The GGUF.
            context: Tokens of the longest text, at least 1.
            threads: CPU threads; None: those that torch uses.
            cache: Number format of cached keys and values; llama.cpp's own default is f16.
            repack: Rearrange quantised weights for this processor: faster, rounds otherwise, and
                was seen to end the process on a virtual machine with AMX.

        Raises:
            UserError: llama-cpp-python is not installed, or cannot load the file.
        """
        if not is_installed():
            raise UserError(
                "llama-cpp-python is not installed, and only it can run a GGUF here. "
                "Run pip install 'dotmoe[llama-cpp]'; it compiles llama.cpp."
            )
        self.path = path
        self.context = context
        numbers = (context, threads or torch.get_num_threads(), _CACHE_TYPES[cache], int(repack))
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            # -P: the folder of the script is not for imports.
            [sys.executable, "-P", str(_WORKER), str(path), *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self.version, self.vocabulary = self._ask("describe")

    def logits(self, tokens_T: Int[Tensor, " T"]) -> Float[Tensor, "T V"]:
        """Logits of every token of one text, float32; texts do not see each other."""
        self._require_room(len(tokens_T))
        return torch.from_numpy(self._ask("logits", tokens_T.tolist()))

    def greedy(self, prompt: Sequence[int], new_tokens: int) -> list[int]:
        """The most likely continuation, token by token; ends of text are no end."""
        self._require_room(len(prompt) + new_tokens - 1)
        made: list[int] = self._ask("greedy", list(prompt), new_tokens)
        return made

    def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text; the names of special tokens in it become those tokens."""
        ids: list[int] = self._ask("tokenize", text, add_special)
        return ids

    def perplexity(
        self, tokenizer: Any, packed: Packed, config: EvaluateConfig
    ) -> PerplexityResult:
        """Perplexity by the very protocol of `dotmoe.evaluate.perplexity`.

        Args:
            tokenizer: The Transformers tokenizer; only to say how documents were joined.
            packed: The text, as `dotmoe.data.pack` makes it.
            config: Window and what to call the text.
        """
        return packed_perplexity(_StockCall(self), tokenizer, packed, config)

    def close(self) -> None:
        """End the process and give its memory back."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _require_room(self, num_tokens: int) -> None:
        if num_tokens > self.context:
            raise UserError(
                f"The text has {num_tokens} tokens, but llama.cpp was given a context of "
                f"{self.context}. Cut the text, or give more context."
            )

    def _ask(self, method: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump((method, arguments), self._process.stdin)
            self._process.stdin.flush()
            return pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
            raise UserError(self._epitaph()) from error

    def _epitaph(self) -> str:
        """One line on why the process has ended."""
        code = self._process.wait()
        self._errors.seek(0)
        lines = [line for line in self._errors.read().decode(errors="replace").splitlines() if line]
        reasons = [line for line in lines if "error" in line.lower() or "GGML_ASSERT" in line]
        self.close()
        what = signal.Signals(-code).name if code < 0 else f"status {code}"
        said = (reasons or lines or ["it said nothing"])[0].strip()
        return (
            f"llama.cpp ended with {what} on {self.path} ({said}). Export it again, or install a "
            "llama-cpp-python that was built for this machine."
        )


class _StockCall:
    """Called like a Transformers model."""

    def __init__(self, model: LlamaCppModel) -> None:
        self._model = model
        self.config = SimpleNamespace(
            max_position_embeddings=model.context, vocab_size=model.vocabulary
        )

    def parameters(self) -> Iterator[Tensor]:
        """Something on the CPU."""
        yield torch.zeros(1)

    def __call__(self, input_ids: Int[Tensor, "B T"], use_cache: bool) -> SimpleNamespace:
        """Logits, [B, T, V]."""
        assert not use_cache
        return SimpleNamespace(logits=torch.stack([self._model.logits(row) for row in input_ids]))
