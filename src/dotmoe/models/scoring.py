"""Logits and losses of a causal language model of Transformers, in parts that fit in memory."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from dotmoe.models.family import readout_of

CHUNK_LOGITS = 1 << 25
"""Maximum number of logits computed at once for one model: 128 MiB in float32."""


def hidden_states(model: Any, tokens_BT: Tensor) -> Tensor:
    """Hidden states after the last norm, which the LM head reads: [B, T, D]."""
    device = next(model.parameters()).device
    output = model.base_model(input_ids=tokens_BT.long().to(device), use_cache=False)
    hidden_BTD: Tensor = output.last_hidden_state
    return hidden_BTD


def nats_of(model: Any, hidden_BTD: Tensor, labels_BT: Tensor) -> Tensor:
    """Cross-entropy of tokens given the LM head's hidden states, float64 on the CPU, [B, T]."""
    labels_T = labels_BT.flatten().long().to(hidden_BTD.device)
    parts = [
        cross_entropy(logits_TV, labels_T[part], reduction="none")
        for part, logits_TV in logits_in_parts(model, hidden_BTD.flatten(0, 1))
    ]
    return torch.cat(parts).double().cpu().view(labels_BT.shape)


def logits_in_parts(model: Any, hidden_TD: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Iterate over parts of a text and their logits in float32, at most `CHUNK_LOGITS` at once."""
    config, head = model.base_model.config, model.get_output_embeddings()
    rows, readout = max(1, CHUNK_LOGITS // int(config.vocab_size)), readout_of(config)
    for start in range(0, len(hidden_TD), rows):
        part = slice(start, start + rows)
        yield part, readout.logits(head(hidden_TD[part]))
