"""Continuations of prompts, greedy and sampled, by any stock model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from dotmoe.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig:
    """What is generated from, and how tokens are sampled."""

    generate: int | None = None
    """Continue prompts by up to this many tokens, greedily and sampled; report samples, side by
    side with those of --against, and how much of them repeats."""
    prompts: tuple[str, ...] = ()
    """Prompts. Default: beginnings cut from --text at equal distances."""
    num_prompts: int = 16
    """Prompts cut from the text."""
    prompt_tokens: int = 32
    """Tokens of a prompt cut from the text."""
    temperature: float = 1.0
    """Of sampling, above 0."""
    top_p: float = 0.95
    """Sample among the likeliest tokens that have this probability together, above 0, up to 1."""
    sampling_seed: int = 0
    """Of sampling; each prompt has one of its own, the same for both models."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuations:
    """What one model makes of the prompts, one entry a prompt; token ids, without EOS."""

    greedy: list[list[int]]
    sampled: list[list[int]]


def cut_prompts(tokens: Sequence[int], config: GenerateConfig) -> list[list[int]]:
    """Prompts of equal length at equal distances in a text.

    Raises:
        UserError: The text is shorter than a prompt, or a number is below 1.
    """
    if config.num_prompts < 1 or config.prompt_tokens < 1:
        raise UserError("num_prompts and prompt_tokens must be at least 1. Choose such numbers.")
    if len(tokens) < config.prompt_tokens:
        raise UserError(
            f"the text has {len(tokens)} tokens, and a prompt has {config.prompt_tokens}. "
            "Give more text, or lower --prompt-tokens."
        )
    number = min(config.num_prompts, len(tokens) // config.prompt_tokens)
    distance = len(tokens) // number
    starts = [index * distance for index in range(number)]
    return [list(tokens[start : start + config.prompt_tokens]) for start in starts]


def require_generable(config: GenerateConfig) -> None:
    """Refuse numbers out of range.

    Raises:
        UserError: Names the option.
    """
    if config.generate is not None and config.generate < 1:
        raise UserError(f"generate is {config.generate}. Choose 1 token or more.")
    if config.temperature <= 0:
        raise UserError(f"temperature is {config.temperature}, but it must be above 0. Raise it.")
    if not 0 < config.top_p <= 1:
        raise UserError(f"top_p is {config.top_p}, but it must be above 0, up to 1. Choose such.")


@torch.no_grad()
def continuations(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    config: GenerateConfig,
    on_progress: Callable[[int, int], None] | None = None,
) -> Continuations:
    """Continue each prompt by up to `config.generate` tokens, or to EOS.

    The model's own generation settings (penalties, temperature) play no part: two models are
    compared by their predictions alone.

    Args:
        model: A causal language model of Transformers.
        tokenizer: Its tokenizer; names EOS.
        prompts: Token ids.
        config: Length and sampling.
        on_progress: Told continuations done and in all.

    Raises:
        UserError: A prompt and its continuation are longer than the context.
    """
    longest = max(map(len, prompts)) + (config.generate or 0)
    context = int(model.config.max_position_embeddings)
    if longest > context:
        raise UserError(
            f"prompt and continuation have {longest} tokens, but the model's context is {context}. "
            "Lower --generate, or give shorter prompts."
        )
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id, top_k=0
    )
    made: dict[bool, list[list[int]]] = {False: [], True: []}
    for sampled in (False, True):
        for index, prompt in enumerate(prompts):
            torch.manual_seed(config.sampling_seed + index)
            made[sampled].append(_continued(model, tokenizer, prompt, config, sampled=sampled))
            if on_progress is not None:
                on_progress(len(prompts) * sampled + index + 1, 2 * len(prompts))
    return Continuations(greedy=made[False], sampled=made[True])


def _continued(
    model: Any, tokenizer: Any, prompt: Sequence[int], config: GenerateConfig, *, sampled: bool
) -> list[int]:
    sampling = {"temperature": config.temperature, "top_p": config.top_p} if sampled else {}
    ids = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=config.generate,
        do_sample=sampled,
        **sampling,
    )
    new: list[int] = output[0, len(prompt) :].tolist()
    return new[:-1] if new and new[-1] == tokenizer.eos_token_id else new
