"""The other side of `LlamaCppModel`: a process of its own that holds one model in llama.cpp.

Run as a script, so it imports no dotmoe. It reads pickled `(method, arguments)` from standard input
and writes pickled answers to what was standard output; llama.cpp's own output goes to standard
error.
"""

import importlib
import os
import pickle
import sys
from typing import Any

import numpy as np


class Worker:
    """One model; methods are called by name."""

    def __init__(
        self, path: str, context: int, threads: int, cache_type: int, repack: bool
    ) -> None:
        self._library = importlib.import_module("llama_cpp")
        if not repack:
            self._use_plain_kernels()
        batch = min(context, 512)
        self._model = self._library.Llama(
            path,
            n_ctx=context,
            n_batch=batch,
            n_ubatch=batch,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=0,
            logits_all=True,
            flash_attn=False,
            type_k=cache_type,
            type_v=cache_type,
            # The wrapper's own defaults would override what the file says.
            yarn_attn_factor=-1.0,
            yarn_beta_fast=-1.0,
            yarn_beta_slow=-1.0,
            verbose=True,  # goes to standard error, of which the other side shows one line at most
        )

    def describe(self) -> tuple[str, int]:
        """Version of llama-cpp-python, and logits a token."""
        return str(self._library.__version__), int(self._model.n_vocab())

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Logits of every token of one text, [T, V]."""
        self._model.reset()
        self._model.eval(tokens)
        return np.array(self._model.scores[: len(tokens)])

    def greedy(self, prompt: list[int], new_tokens: int) -> list[int]:
        """The most likely continuation, token by token."""
        self._model.reset()
        self._model.eval(prompt)
        made: list[int] = []
        while len(made) < new_tokens:
            made.append(int(self._model.scores[self._model.n_tokens - 1].argmax()))
            if len(made) < new_tokens:
                self._model.eval(made[-1:])
        return made

    def tokenize(self, text: str, add_special: bool) -> list[int]:
        """Token ids of a text."""
        ids: list[int] = self._model.tokenize(text.encode(), add_bos=add_special, special=True)
        return ids

    def _use_plain_kernels(self) -> None:
        """Keep weights as stored; the wrapper has no option for it."""
        functions: Any = importlib.import_module("llama_cpp.llama_cpp")
        defaults = functions.llama_model_default_params

        def plain() -> Any:
            parameters = defaults()
            if hasattr(parameters, "use_extra_bufts"):
                parameters.use_extra_bufts = False
            return parameters

        functions.llama_model_default_params = plain


def main() -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    path, *numbers = sys.argv[1:]
    context, threads, cache_type, repack = map(int, numbers)
    worker = Worker(path, context, threads, cache_type, bool(repack))
    while True:
        try:
            method, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(getattr(worker, method)(*arguments), answers)
        answers.flush()


if __name__ == "__main__":
    main()
