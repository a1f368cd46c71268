"""What models write: continuations of prompts, side by side, and how much of them repeats."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from dotmoe.errors import UserError
from dotmoe.evaluate.config import EvaluateConfig, GenerateConfig
from dotmoe.evaluate.models import StockModel, by_side
from dotmoe.evaluate.perplexity import packed_text
from dotmoe.progress import Progress, Update, no_update

LONGEST_PERIOD = 64
"""Tokens of the longest block whose repetition is found."""

FEWEST_ROUNDS = 3
"""A block that stands so many times in a row is a loop."""

SHORTEST_LOOP = 12
"""Tokens of the shortest loop: shorter ones are indentation, dots and dashes."""


def measure_generation(config: EvaluateConfig, progress: Progress) -> dict[str, Any]:
    """Greedy and sampled continuations by each model, and how much of them repeats.

    Prompts from `config.corpus.text` are cut by the tokenizer of each model: where the two have
    another tokenizer their prompts may differ at the ends.
    """
    asked = config.generation
    if not asked.prompts and not config.corpus.text:
        raise UserError("there is nothing to continue. Give --prompts, or --text to cut them from.")

    def measured(stock: StockModel) -> dict[str, Any]:
        if asked.prompts:
            prompts = [stock.tokenizer(prompt).input_ids for prompt in asked.prompts]
        else:
            tokens = packed_text(config.corpus, stock.tokenizer).tokens.tolist()
            prompts = cut_prompts(tokens, asked)
        made = continuations(stock.model, stock.tokenizer, prompts, asked, update)
        decode = stock.tokenizer.batch_decode
        return {
            "prompts": decode(prompts, skip_special_tokens=True),
            **{
                way: {"repetition": repetition(texts), "texts": decode(texts)}
                for way, texts in made.items()
            },
        }

    with progress.bar("evaluate") as update:
        sides = by_side(config, measured)
    names = ("generate", "num_prompts", "prompt_tokens", "temperature", "top_p", "sampling_seed")
    settings = {name: getattr(asked, name) for name in names}
    return {**sides, "settings": settings, "text": list(config.corpus.text)}


def cut_prompts(tokens: Sequence[int], config: GenerateConfig) -> list[list[int]]:
    """Prompts of equal length at equal distances in a text.

    Raises:
        UserError: The text is shorter than a prompt.
    """
    if len(tokens) < config.prompt_tokens:
        raise UserError(
            f"the text has {len(tokens)} tokens, and a prompt has {config.prompt_tokens}. "
            "Give more text, or lower --prompt-tokens."
        )
    number = min(config.num_prompts, len(tokens) // config.prompt_tokens)
    starts = [index * (len(tokens) // number) for index in range(number)]
    return [list(tokens[start : start + config.prompt_tokens]) for start in starts]


@torch.no_grad()
def continuations(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    config: GenerateConfig,
    on_progress: Update = no_update,
) -> dict[str, list[list[int]]]:
    """Continue each prompt by up to `config.generate` tokens, or to EOS.

    The model's own generation settings (penalties, temperature) play no part: two models are
    compared by their predictions alone.

    Returns:
        Token ids without EOS, one list a prompt, as `greedy` and as `sampled`.

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
    end = tokenizer.eos_token_id
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end, top_k=0)
    sampling = {"do_sample": True, "temperature": config.temperature, "top_p": config.top_p}
    ways: dict[str, dict[str, Any]] = {"greedy": {"do_sample": False}, "sampled": sampling}
    made: dict[str, list[list[int]]] = {way: [] for way in ways}
    for round_, (way, options) in enumerate(ways.items()):
        for index, prompt in enumerate(prompts):
            torch.manual_seed(config.sampling_seed + index)
            ids = torch.tensor([list(prompt)], device=next(model.parameters()).device)
            every = torch.ones_like(ids)
            output = model.generate(
                ids, attention_mask=every, max_new_tokens=config.generate, **options
            )
            new: list[int] = output[0, len(prompt) :].tolist()
            made[way].append(new[:-1] if new and new[-1] == end else new)
            on_progress(len(prompts) * round_ + index + 1, 2 * len(prompts))
    return made


def loop_tokens(tokens: Sequence[int]) -> list[bool]:
    """Whether each token lies in a loop.

    A loop is a stretch of `SHORTEST_LOOP` tokens or more in which each token equals the one p
    places before it, and which is `FEWEST_ROUNDS` times p long or longer, for some period p up to
    `LONGEST_PERIOD`.

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


def rep_n(tokens: Sequence[int], n: int) -> float:
    """1 - |different n-grams| / |n-grams| of one continuation; 0 where it has none.

    Example:
        >>> rep_n([1, 2, 1, 2, 1], 2)
        0.5
    """
    grams = _grams(tokens, n)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def distinct_n(texts: Sequence[Sequence[int]], n: int) -> float:
    """Different n-grams of all continuations together, over their number; 1 where there are none.

    Example:
        >>> distinct_n([[1, 2], [1, 3]], 1)
        0.75
    """
    grams = [gram for tokens in texts for gram in _grams(tokens, n)]
    return len(set(grams)) / len(grams) if grams else 1.0


def repetition(texts: Sequence[Sequence[int]]) -> dict[str, float]:
    """How much a set of continuations repeats itself, 0 to 1 each; `tokens` is their number.

    Returns:
        `loop_share`: share of all tokens that lie in a loop. `looping`: share of continuations that
        end in one. `rep_2`, `rep_3`, `rep_4`: `rep_n`, mean over continuations. `diversity`:
        (1 - rep-2)(1 - rep-3)(1 - rep-4) of the means. `distinct_1`, `distinct_2`: `distinct_n`.
    """
    loops = [loop_tokens(tokens) for tokens in texts]
    total = sum(map(len, texts))
    means = {f"rep_{n}": sum(rep_n(each, n) for each in texts) / len(texts) for n in (2, 3, 4)}
    return {
        "loop_share": sum(map(sum, loops)) / max(1, total),
        "looping": sum(bool(inside and inside[-1]) for inside in loops) / len(texts),
        **means,
        "diversity": (1 - means["rep_2"]) * (1 - means["rep_3"]) * (1 - means["rep_4"]),
        "distinct_1": distinct_n(texts, 1),
        "distinct_2": distinct_n(texts, 2),
        "tokens": total,
    }


def _grams(tokens: Sequence[int], n: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
