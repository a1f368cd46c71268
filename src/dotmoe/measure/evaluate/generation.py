"""Text that models generate: greedy continuations of prompts, side by side."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from dotmoe.common.errors import UserError
from dotmoe.common.files import Values
from dotmoe.common.progress import Progress, Update, no_update
from dotmoe.common.tables import Table
from dotmoe.measure.evaluate.models import EvaluateConfig, StockModel, by_side, in_context, sides_of
from dotmoe.measure.evaluate.perplexity import packed_text

PROMPT_TOKENS = 32
"""Length, in tokens, of a prompt that is cut from the text."""


def measure_generation(config: EvaluateConfig, progress: Progress) -> Values:
    """For each model the `prompts`, and the `texts` that continue them.

    Prompts from `config.corpus.text` are cut by the tokenizer of each model. Raises `UserError` if
    two tokenizers cut different prompts, or a prompt has no tokens.
    """

    def measured(stock: StockModel, update: Update) -> Values:
        tokenizer = stock.tokenizer
        if config.prompts:
            prompts = [tokenizer(prompt).input_ids for prompt in config.prompts]
        else:
            tokens = packed_text(config.corpus, tokenizer).tokens
            size = min(PROMPT_TOKENS, len(tokens))
            starts = range(0, len(tokens) - size + 1, max(size, len(tokens) // config.num_prompts))
            prompts = [tokens[at : at + size].tolist() for at in starts[: config.num_prompts]]
        shown = config.prompts or tokenizer.batch_decode(prompts, skip_special_tokens=True)
        new = continuations(stock.model, tokenizer, prompts, config.generate or 0, update)
        return {"prompts": list(shown), "texts": tokenizer.batch_decode(new)}

    sides = by_side(config, progress, measured)
    if len({tuple(side["prompts"]) for side in sides.values()}) > 1:
        raise UserError(
            "the tokenizers of the two models cut --text into different prompts. Give --prompts."
        )
    return {**sides, "text": list(config.corpus.text)}


@torch.no_grad()
def continuations(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    on_progress: Update = no_update,
) -> list[list[int]]:
    """Token ids that continue each prompt greedily, at most `new_tokens`, without EOS.

    The model's own generation settings (penalties, temperature) are ignored: two models are
    compared by their predictions alone. Raises `UserError` if a prompt is empty or too long.
    """
    if not all(prompts):
        raise UserError("a prompt has no tokens, and this tokenizer adds none. Write some text.")
    longest = max(map(len, prompts)) + new_tokens
    context = int(model.config.max_position_embeddings)
    remedy = "Lower --generate, or give shorter prompts."
    in_context("the length of a prompt with --generate", longest, context, remedy=remedy)
    end = tokenizer.eos_token_id
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end, do_sample=False)
    continued = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=model.device)
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens)
        new: list[int] = output[0, len(prompt) :].tolist()
        continued.append(new[:-1] if new and new[-1] == end else new)
        on_progress(len(continued), len(prompts))
    return continued


def shown_texts(result: Values) -> list[Table | str]:
    """The first prompts, and how each model continues them."""
    lines: list[Table | str] = []
    for index, prompt in enumerate(result["model"]["prompts"][:4]):
        lines.append(f"--- {prompt!r}")
        lines += [f"{side['name']}: {side['texts'][index]!r}" for side in sides_of(result)]
    return lines
