"""Logits of an export and of its oracle, the masked dense model, and how far they are apart."""

from dataclasses import replace
from itertools import pairwise

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from dotmoe.method.layout import DROPPED
from dotmoe.method.masked import masked_by
from dotmoe.models.hooks import cache_arguments


def logits_of(model, tokens_BT):
    with torch.no_grad():
        return model(input_ids=tokens_BT, use_cache=False).logits


def without_last(layout, number):
    """The layout without its last experts, whose neurons are left out."""
    kept, expert_LN = layout.num_experts - number, layout.expert_of_neuron_LN
    expert_LN = torch.where(expert_LN < kept, expert_LN, DROPPED)
    return replace(layout, expert_of_neuron_LN=expert_LN, router_LED=layout.router_LED[:, :kept])


def step_by_step(model, tokens_BT, prompt=9):
    """Logits of a model that reads a prompt, then one token at a time with its KV cache."""
    options = cache_arguments(DynamicCache(config=model.config))
    found = []
    for start, end in pairwise((0, *range(prompt, tokens_BT.shape[1] + 1))):
        with torch.no_grad():
            found.append(model(input_ids=tokens_BT[:, start:end], **options).logits)
    return torch.cat(found, dim=1)


def masked_logits(dense, layout, tokens_BT):
    with masked_by(dense, *(layout if isinstance(layout, tuple) else (layout,))):
        return logits_of(dense.model, tokens_BT)


def stock_logits(folder, tokens_BT, **overrides):
    """By plain Transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **overrides)
    return logits_of(model, tokens_BT)


def require_rounded_as_masked(model, dense, half, layout, tokens_BT):
    """In 16 bits a model is as close to the float32 masked model as that is in 16 bits.

    A token whose experts tie in 16 bits may be sent elsewhere; medians do not mind.
    """
    found, exact, masked = (
        logits_of(model, tokens_BT).float(),
        masked_logits(dense, layout, tokens_BT),
        masked_logits(half, layout, tokens_BT).float(),
    )
    error, allowed = ((each - exact).abs().mean(dim=-1).median() for each in (found, masked))
    assert float(error) < 1.5 * float(allowed)


def relative_error(actual, reference):
    # Of the median token: a near-tie that falls the other way changes all later tokens of its row.
    per_token = (actual - reference).abs().mean(dim=-1).flatten()
    return float(per_token.median() / reference.std())
