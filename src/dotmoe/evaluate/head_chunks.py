"""Hidden states and logits of stock models, never tokens x vocabulary at once."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

CHUNK_LOGITS = 1 << 25
"""Logits formed at once, in one model: 128 MiB in float32."""


def hidden_states(model: Any, tokens_BT: Tensor) -> Tensor:
    """What the LM head reads, [B, T, D]: hidden states after the last norm."""
    device = next(model.parameters()).device
    output = model.base_model(input_ids=tokens_BT.long().to(device), use_cache=False)
    hidden_BTD: Tensor = output.last_hidden_state
    return hidden_BTD


def logits(model: Any, hidden_TD: Tensor) -> Tensor:
    """Logits of some hidden states in float32, with the scale that Granite has after its head."""
    logits_TV: Tensor = model.get_output_embeddings()(hidden_TD).float()
    return logits_TV / getattr(model.config, "logits_scaling", 1.0)


def chunks(num_tokens: int, vocabulary: int) -> Iterator[slice]:
    """Parts of a row of tokens whose logits may exist at once."""
    rows = max(1, CHUNK_LOGITS // vocabulary)
    for start in range(0, num_tokens, rows):
        yield slice(start, start + rows)


def token_nats(model: Any, hidden_TD: Tensor, labels_T: Tensor) -> Tensor:
    """Cross-entropy of each label in nats, float64 on the CPU, [T]."""
    parts = [
        torch.nn.functional.cross_entropy(
            logits(model, hidden_TD[part]), labels_T[part], reduction="none"
        )
        for part in chunks(len(labels_T), int(model.config.vocab_size))
    ]
    return torch.cat(parts).double().cpu()
