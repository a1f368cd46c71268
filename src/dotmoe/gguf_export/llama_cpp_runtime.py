"""What is asked of llama.cpp besides logits and tokens: greedy text of a GGUF."""

from collections.abc import Sequence

import torch

from dotmoe import llama_cpp


class LlamaCppModel(llama_cpp.LlamaCppModel):
    """See `dotmoe.llama_cpp.LlamaCppModel`."""

    def greedy(self, prompt: Sequence[int], new_tokens: int) -> list[int]:
        """The most likely continuation, token by token; ends of text are no end."""
        ids = list(prompt)
        while len(ids) < len(prompt) + new_tokens:
            ids.append(int(self.logits(torch.tensor(ids))[-1].argmax()))
        return ids[len(prompt) :]
