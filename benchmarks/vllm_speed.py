"""Decode speed of random weights in vLLM, whose environment has nothing of this project.

    vllm-env/bin/python benchmarks/vllm_speed.py FOLDER DTYPE CONTEXT STEPS ROUNDS BATCH...

FOLDER has a config. Prints tokens per second by batch and round: a prompt of CONTEXT tokens is
continued by 1 token, then by 1 + STEPS, and the difference of the times is of STEPS decodes.
"""

import json
import sys
import time

import vllm

folder, dtype, *numbers = sys.argv[1:]
context, steps, rounds, *batches = map(int, numbers)
model = vllm.LLM(
    **{"model": folder, "dtype": dtype, "load_format": "dummy", "skip_tokenizer_init": True},
    **{"max_model_len": context + steps + 2, "max_num_seqs": max(batches)},
    **{"enforce_eager": True, "enable_prefix_caching": False},
)


def seconds(batch: int, tokens: int) -> float:
    """Time of a batch's prefill and its tokens."""
    asked = vllm.SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [7 + row] * context} for row in range(batch)]
    began = time.perf_counter()
    model.generate(prompts, asked, use_tqdm=False)
    return time.perf_counter() - began


speeds = dict[int, list[float]]()
for size in batches:
    seconds(size, 2)  # warms up
    taken = [seconds(size, 1 + steps) - seconds(size, 1) for _ in range(rounds)]
    speeds[size] = [size * steps / each for each in taken]
print(json.dumps({"version": vllm.__version__, "tokens_per_s": speeds}))
