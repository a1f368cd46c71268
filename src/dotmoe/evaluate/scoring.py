"""Anything that scores tokens, as one function; never tokens x vocabulary at once."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

TokenNats = Callable[[Tensor], Tensor]
"""Token ids [B, T] -> cross-entropy of every token but the first of each row, in nats: float64 on
the CPU, [B, T - 1]. Rows do not see each other. Perplexity needs no more of a model than this."""

CHUNK_LOGITS = 1 << 25
"""Logits formed at once, in one model: 128 MiB in float32."""


def stock_nats(model: Any) -> TokenNats:
    """Scores by a causal language model of Transformers in evaluation mode, in float32.

    Rows may have one token more than the context, since the last one is only predicted.
    """

    @torch.no_grad()
    def nats(tokens_BT: Tensor) -> Tensor:
        hidden_TD = hidden_states(model, tokens_BT[:, :-1]).flatten(0, 1)
        labels_T = tokens_BT[:, 1:].flatten().long().to(hidden_TD.device)
        parts = [
            cross_entropy(logits(model, hidden_TD[part]), labels_T[part], reduction="none")
            for part in chunks(len(labels_T), int(model.config.vocab_size))
        ]
        return torch.cat(parts).double().cpu().view(len(tokens_BT), -1)

    return nats


def row_nats(logits_of: Callable[[Tensor], Tensor]) -> TokenNats:
    """Scores by a runtime that gives all logits [T, V] of one text [T], such as llama.cpp."""

    def nats(row: Tensor) -> Tensor:
        return cross_entropy(logits_of(row[:-1]).double(), row[1:].long(), reduction="none")

    return lambda tokens_BT: torch.stack([nats(row) for row in tokens_BT])


def hidden_states(model: Any, tokens_BT: Tensor) -> Tensor:
    """What the LM head reads, [B, T, D]: hidden states after the last norm."""
    device = next(model.parameters()).device
    output = model.base_model(input_ids=tokens_BT.long().to(device), use_cache=False)
    hidden_BTD: Tensor = output.last_hidden_state
    return hidden_BTD


def logits(model: Any, hidden_TD: Tensor) -> Tensor:
    """Logits of some hidden states in float32, with what Granite, Cohere and Gemma do to them."""
    config = model.config
    logits_TV: Tensor = model.get_output_embeddings()(hidden_TD).float()
    logits_TV = logits_TV * getattr(config, "logit_scale", 1) / getattr(config, "logits_scaling", 1)
    cap = getattr(config, "final_logit_softcapping", None)
    return logits_TV if cap is None else torch.tanh(logits_TV / cap) * cap


def chunks(num_tokens: int, vocabulary: int) -> Iterator[slice]:
    """Parts of a row of tokens whose logits may exist at once."""
    rows = max(1, CHUNK_LOGITS // vocabulary)
    for start in range(0, num_tokens, rows):
        yield slice(start, start + rows)
