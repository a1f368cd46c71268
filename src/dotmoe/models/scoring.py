"""Logits and losses of a causal language model of Transformers, in parts that fit in memory."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from dotmoe.common.sharded import full_tensor
from dotmoe.models.hf_config import readout_of

CHUNK_LOGITS = 1 << 25
"""Maximum number of logits computed at once for one model: 128 MiB in float32."""
_PROBE_TOKENS = 8
_SAME_LOGITS = 0.02
"""Largest difference of logits, as a share of the largest logit, that rounding explains."""


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


@torch.no_grad()
def loss_of(model: Any, tokens_BT: Tensor) -> float:
    """Mean cross-entropy in nats of all tokens but the first of each row; for a few tokens.

    Weights may be in shards: then all ranks must call this together.
    """
    hidden_BTD = hidden_states(model, tokens_BT[:, :-1])
    head_VD = full_tensor(model.get_output_embeddings().weight)
    logits_BTV = readout_of(model.base_model.config).logits(hidden_BTD @ head_VD.T)
    labels_T = tokens_BT[:, 1:].flatten().long().to(logits_BTV.device)
    return float(cross_entropy(logits_BTV.flatten(0, 1), labels_T))


@torch.no_grad()
def makes_usual_logits(model: Any) -> bool:
    """Whether a model's logits follow from its hidden states as `logits_in_parts` has them.

    A few tokens show it. Some stock models scale their logits by settings of their own, or have
    layers between the last norm and the head.
    """
    num_tokens = min(_PROBE_TOKENS, int(model.base_model.config.vocab_size))
    device = next(model.parameters()).device
    tokens_BT = torch.arange(num_tokens, device=device)[None]
    own_TV = model(input_ids=tokens_BT, use_cache=False).logits[0].float()
    hidden_TD = hidden_states(model, tokens_BT)[0]
    ours_TV = torch.cat([logits_TV for _, logits_TV in logits_in_parts(model, hidden_TD)])
    return float((ours_TV - own_TV).abs().max()) <= _SAME_LOGITS * float(own_TV.abs().max())


def logits_in_parts(model: Any, hidden_TD: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Iterate over parts of a text and their logits in float32, at most `CHUNK_LOGITS` at once."""
    config = model.base_model.config
    head = model.get_output_embeddings()
    readout = readout_of(config)
    rows = max(1, CHUNK_LOGITS // int(config.vocab_size))
    for start in range(0, len(hidden_TD), rows):
        part = slice(start, start + rows)
        yield part, readout.logits(head(hidden_TD[part]))
