"""Text that models generate: continuations of prompts, or answers to them, side by side."""

from collections.abc import Sequence
from textwrap import indent
from typing import Any

import torch
from transformers import GenerationConfig

from dotmoe.common.errors import UserError
from dotmoe.common.files import Values
from dotmoe.common.progress import Progress, Update, no_update
from dotmoe.common.tables import Table
from dotmoe.measure.config import EvaluateConfig, in_context
from dotmoe.measure.evaluate.models import StockModel, by_side, sides_of
from dotmoe.models.chat import asked, end_tokens
from dotmoe.text.rows import require_text

_INDENT = "    "


def measure_generation(config: EvaluateConfig, progress: Progress) -> Values:
    """For each model the `prompts`, and the `texts` that continue them.

    Raises `UserError` if a prompt has no tokens or is no Unicode text, or a chat template is
    missing.
    """
    for number, prompt in enumerate(config.prompts, start=1):
        require_text(prompt, f"prompt {number} of --prompts")

    def measured(stock: StockModel, update: Update) -> Values:
        tokenizer = stock.tokenizer
        if config.chat_template:
            prompts = [
                asked(tokenizer, [{"role": "user", "content": prompt}]) for prompt in config.prompts
            ]
        else:
            prompts = [_opened(tokenizer, prompt) for prompt in config.prompts]
        new = generated(
            stock.model,
            tokenizer,
            prompts,
            config.generate or 0,
            update,
            temperature=config.temperature,
            repetition_penalty=config.repetition_penalty,
        )
        return {"prompts": list(config.prompts), "texts": tokenizer.batch_decode(new)}

    how = {
        "temperature": config.temperature,
        "repetition_penalty": config.repetition_penalty,
    }
    return by_side(config, progress, measured) | how


def _opened(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of a prompt to continue, without the end of text that some tokenizers put there."""
    ids: list[int] = tokenizer(prompt).input_ids
    bare = tokenizer(prompt, add_special_tokens=False).input_ids
    end = [tokenizer.eos_token_id]
    has_end = ids[-1:] == end
    prompt_has_end = bare[-1:] == end
    return ids[:-1] if has_end and not prompt_has_end else ids


@torch.no_grad()
def generated(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    on_progress: Update = no_update,
    *,
    temperature: float = 0.0,
    repetition_penalty: float = 1.0,
) -> list[list[int]]:
    """Token ids by which Transformers continues each prompt, at most `new_tokens`.

    A continuation ends where own answers do, and has no token that ends it.

    Temperature 0 takes the most likely token; above it, each prompt is sampled with seed 0. The
    model's own generation settings (penalties, cut-offs) are ignored: two models are compared by
    their predictions alone. Raises `UserError` if a prompt is empty or too long.
    """
    if not all(prompts):
        raise UserError("a prompt has no tokens, and this tokenizer adds none. Write some text.")
    longest = max(map(len, prompts)) + new_tokens
    context = int(model.config.max_position_embeddings)
    remedy = "Lower --generate, or give shorter prompts."
    in_context("the length of a prompt with --generate", longest, context, remedy=remedy)
    ends = sorted(end_tokens(model, tokenizer))
    sampled = {"temperature": temperature, "top_k": 0} if temperature else {}
    model.generation_config = GenerationConfig(
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else None,
        do_sample=temperature > 0,
        repetition_penalty=repetition_penalty,
        **sampled,
    )
    continued = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=model.device)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens
            )
        new: list[int] = output[0, len(prompt) :].tolist()
        continued.append(new[:-1] if new and new[-1] in ends else new)
        on_progress(len(continued), len(prompts))
    return continued


def shown_texts(result: Values) -> list[Table | str]:
    """The prompts, and how each model continues them."""
    lines: list[Table | str] = []
    for index, prompt in enumerate(result["model"]["prompts"]):
        lines.append(f"prompt:\n{indent(prompt.strip(), _INDENT)}\n")
        for side in sides_of(result):
            text = indent(side["texts"][index].strip(), _INDENT)
            lines.append(f"continued by {side['name']}:\n{text}\n")
    return lines
