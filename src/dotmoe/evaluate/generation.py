"""What models write: continuations of prompts, side by side, and how much of them repeats."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from transformers import GenerationConfig

from dotmoe.errors import UserError
from dotmoe.evaluate.config import EvaluateConfig, GenerateConfig
from dotmoe.evaluate.models import StockModel, by_side
from dotmoe.evaluate.perplexity import packed_text
from dotmoe.progress import Progress, Update, no_update

LONGEST_PERIOD, FEWEST_ROUNDS, SHORTEST_LOOP = 64, 3, 12
"""A loop repeats a block of at most so many tokens so many times in a row, and is so long at least:
shorter ones are indentation, dots and dashes."""


def measure_generation(config: EvaluateConfig, progress: Progress) -> dict[str, Any]:
    """Greedy and sampled continuations by each model, and how much of them repeats.

    Prompts from `config.corpus.text` are cut by the tokenizer of each model.
    """
    asked = config.generation

    def measured(stock: StockModel, update: Update) -> dict[str, Any]:
        if asked.prompts:
            prompts = [stock.tokenizer(prompt).input_ids for prompt in asked.prompts]
        else:
            tokens, size = packed_text(config.corpus, stock.tokenizer).tokens, asked.prompt_tokens
            distance = max(size, len(tokens) // asked.num_prompts)
            parts = torch.split(tokens, distance)[: asked.num_prompts]
            size = min(size, len(tokens))
            prompts = [part[:size].tolist() for part in parts if len(part) >= size]
        made = continuations(stock.model, stock.tokenizer, prompts, asked, update)
        decode = stock.tokenizer.batch_decode
        return {"prompts": decode(prompts, skip_special_tokens=True)} | {
            way: {"repetition": repetition(texts), "texts": decode(texts)}
            for way, texts in made.items()
        }

    sides = by_side(config, progress, measured)
    names = ("generate", "num_prompts", "prompt_tokens", "temperature", "top_p", "sampling_seed")
    settings = {name: getattr(asked, name) for name in names}
    return {**sides, "settings": settings, "text": list(config.corpus.text)}


@torch.no_grad()
def continuations(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    config: GenerateConfig,
    on_progress: Update = no_update,
) -> dict[str, list[list[int]]]:
    """Token ids that continue each prompt, without EOS, as `greedy` and as `sampled`.

    The model's own generation settings (penalties, temperature) play no part: two models are
    compared by their predictions alone. `UserError` beyond the context.
    """
    longest = max(map(len, prompts)) + (config.generate or 0)
    context = int(model.config.max_position_embeddings)
    if longest > context:
        raise UserError(
            f"prompt and continuation have {longest} tokens, but the model's context is {context}. "
            "Lower --generate, or give shorter prompts."
        )
    end = tokenizer.eos_token_id
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end, top_k=0)
    greedy: dict[str, Any] = {"do_sample": False}
    sampling = {"do_sample": True, "temperature": config.temperature, "top_p": config.top_p}
    made: dict[str, list[list[int]]] = {"greedy": [], "sampled": []}
    for way, options in zip(made, (greedy, sampling), strict=True):
        for index, prompt in enumerate(prompts):
            torch.manual_seed(config.sampling_seed + index)
            ids = torch.tensor([list(prompt)], device=model.device)
            options["attention_mask"] = torch.ones_like(ids)
            output = model.generate(ids, max_new_tokens=config.generate, **options)
            new: list[int] = output[0, len(prompt) :].tolist()
            made[way].append(new[:-1] if new and new[-1] == end else new)
            on_progress(sum(map(len, made.values())), 2 * len(prompts))
    return made


def loop_tokens(tokens: Sequence[int]) -> list[bool]:
    """Whether each token lies in a loop.

    In a loop each token equals the one p places before it, for some period p up to
    `LONGEST_PERIOD`; it is `FEWEST_ROUNDS` times p tokens long or longer.

    Example:
        >>> sum(loop_tokens([5, 6, 7] + [1, 2, 3, 4] * 3))
        12
    """
    inside = [False] * len(tokens)
    for period in range(1, min(LONGEST_PERIOD, len(tokens) // FEWEST_ROUNDS) + 1):
        start = 0
        for place in range(period, len(tokens) + 1):
            if place < len(tokens) and tokens[place] == tokens[place - period]:
                continue
            if place - start >= max(SHORTEST_LOOP, FEWEST_ROUNDS * period):
                inside[start:place] = [True] * (place - start)
            start = place - period + 1
    return inside


def distinct_n(texts: Sequence[Sequence[int]], n: int) -> float:
    """Different n-grams of all continuations together, over their number; 1 where there are none.

    Example:
        >>> distinct_n([[1, 2], [1, 3]], 1)
        0.75
    """
    grams = [tuple(each[at : at + n]) for each in texts for at in range(len(each) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def repetition(texts: Sequence[Sequence[int]]) -> dict[str, float]:
    """How much a set of continuations repeats itself, 0 to 1 each; `tokens` is their number.

    `loop_share`: share of all tokens that lie in a loop. `looping`: share of continuations that end
    in one. `rep_2`, `rep_3`, `rep_4`: 1 - `distinct_n` of one continuation, mean over all.
    `diversity`: (1 - rep-2)(1 - rep-3)(1 - rep-4) of the means. `distinct_1`, `distinct_2`.
    """
    loops = [loop_tokens(tokens) for tokens in texts]
    total = sum(map(len, texts))
    means = {f"rep_{n}": 1 - fmean(distinct_n([each], n) for each in texts) for n in (2, 3, 4)}
    return {
        "loop_share": sum(map(sum, loops)) / max(1, total),
        "looping": sum(bool(inside and inside[-1]) for inside in loops) / len(texts),
        **means,
        "diversity": (1 - means["rep_2"]) * (1 - means["rep_3"]) * (1 - means["rep_4"]),
        "distinct_1": distinct_n(texts, 1),
        "distinct_2": distinct_n(texts, 2),
        "tokens": total,
    }
