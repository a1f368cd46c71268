"""Own answers beside `generate` of Transformers: tokens per second on the same prompts, in turns.

    python benchmarks/sampling.py MODEL --rows 64 --new-tokens 128

Both draw at temperature 0.7 from the 40 most likely tokens and end at the same token. The figure of
a turn is the ratio of the two, so that other work on the machine matters less.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from dotmoe.models.chat import asked, end_tokens
from dotmoe.models.config import LoadConfig
from dotmoe.models.load import load_dense
from dotmoe.models.sampling import Sampling, continuations
from dotmoe.text.questions import own_prompts


def main() -> None:
    reading = argparse.ArgumentParser(description=__doc__)
    reading.add_argument("model")
    reading.add_argument("--rows", type=int, default=64, help="prompts")
    reading.add_argument("--new-tokens", type=int, default=128, help="longest answer")
    reading.add_argument("--rounds", type=int, default=3)
    reading.add_argument("--dtype", default="auto")
    options = reading.parse_args()
    dense = load_dense(options.model, LoadConfig(dtype=options.dtype))
    questions = own_prompts("asked")[: options.rows]
    prompts = [asked(dense.tokenizer, question.messages) for question in questions]
    ends = end_tokens(dense.model, dense.tokenizer)
    how = Sampling(new_tokens=options.new_tokens, rows=options.rows)

    def ours() -> int:
        return sum(len(made.ids) for made in continuations(dense.model, prompts, how, ends))

    def stock() -> int:
        return generated(dense.model, prompts, how, ends)

    ratios = []
    for number in range(options.rounds):
        speeds = [speed(each) for each in (ours, stock)]
        ratios.append(speeds[0] / speeds[1])
        print(
            f"round {number}: {speeds[0]:.1f} and {speeds[1]:.1f} tokens/s, {ratios[-1]:.2f} times"
        )
    print(f"median of {options.rounds} rounds: {median(ratios):.2f} times")


def speed(write: Callable[[], int]) -> float:
    """Tokens per second of one call."""
    started = time.perf_counter()
    return write() / (time.perf_counter() - started)


@torch.no_grad()
def generated(model: Any, prompts: list[list[int]], how: Sampling, ends: set[int]) -> int:
    """Number of tokens that `generate` draws up to the end of each row, the end token included."""
    longest, end = max(map(len, prompts)), min(ends)
    padded = [[end] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    output: Tensor = model.generate(
        torch.tensor(padded, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        generation_config=GenerationConfig(
            do_sample=True,
            temperature=how.temperature,
            top_k=how.top_k,
            max_new_tokens=how.new_tokens,
            eos_token_id=sorted(ends),
            pad_token_id=end,
        ),
    )
    new_BT = output[:, longest:].cpu()
    has_ended_BT = torch.isin(new_BT, torch.tensor(sorted(ends))).cumsum(1) > 0
    return int((~has_ended_BT).sum() + has_ended_BT.any(1).sum())


if __name__ == "__main__":
    main()
