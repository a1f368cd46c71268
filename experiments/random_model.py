"""A random dense model, wider than the embedded one, to measure the time of a step.

    python experiments/random_model.py OUT

Its FFNs have a quarter of Qwen2.5-7B's width and as many experts; its tokenizer is the embedded
model's. Its output is noise, but the cost of an alignment step does not depend on that.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from dotmoe.common.files import write_json
from dotmoe.models.load import describe_dense
from dotmoe.run.folder import provenance

SHAPE = {
    "hidden_size": 896,
    "intermediate_size": 4_736,
    "num_hidden_layers": 4,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
}

if __name__ == "__main__":
    out, described = Path(sys.argv[1]), describe_dense("embedded")
    described.config.update(SHAPE)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(described.config).save_pretrained(out)
    described.tokenizer.save_pretrained(out)
    record = {"origin": "measured", "shape": SHAPE, "provenance": provenance(seed=0)}
    write_json(out / "random_model.json", record)
