"""What is asked of llama.cpp besides logits and tokens: perplexity and greedy text of a GGUF."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from dotmoe import llama_cpp
from dotmoe.data import Packed
from dotmoe.evaluate.perplexity import EvaluateConfig, PerplexityResult, packed_perplexity


class LlamaCppModel(llama_cpp.LlamaCppModel):
    """See `dotmoe.llama_cpp.LlamaCppModel`."""

    def greedy(self, prompt: Sequence[int], new_tokens: int) -> list[int]:
        """The most likely continuation, token by token; ends of text are no end."""
        ids = list(prompt)
        while len(ids) < len(prompt) + new_tokens:
            ids.append(int(self.logits(torch.tensor(ids))[-1].argmax()))
        return ids[len(prompt) :]

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
