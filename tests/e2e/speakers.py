"""Tiny models that have a chat template, and their closeness by stock Transformers alone."""

import json

import torch
from transformers import AutoModelForCausalLM

from runs import TINY_CONVERT

CHATML = (
    "{% for m in messages %}<u>{{ m['role'] }}:{{ m['content'] }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<u>assistant:{% endif %}"
)
OPTIONS = TINY_CONVERT | {"steps": 0, "answer_tokens": 800, "heldout_answers": 3, "seq_len": 64}


@torch.no_grad()
def stock_closeness(dense, folder, answers_file, **overrides):
    """KL per answer token and share of equal top tokens, by stock Transformers alone."""
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **more)
        for path, more in ((dense, {}), (folder, overrides))
    )
    kls, sames = [], []
    for line in answers_file.read_text().splitlines():
        row = json.loads(line)
        ids, start = torch.tensor([row["ids"]]), row["answer_start"]
        logits = (
            model(input_ids=ids).logits[0, start - 1 : -1].double() for model in (ours, theirs)
        )
        first, second = (each.log_softmax(1) for each in logits)
        kls.append((first.exp() * (first - second)).sum(1))
        sames.append(first.argmax(1) == second.argmax(1))
    return float(torch.cat(kls).mean()), float(torch.cat(sames).double().mean())
