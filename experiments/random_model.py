"""A random dense model, wider than the embedded one, to measure the time of a step.

    python experiments/random_model.py OUT

Its FFNs have a quarter of Qwen2.5-7B's width and as many experts; its tokenizer is the embedded
model's. Its output is noise, but the cost of an alignment step does not depend on that.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from transformers import AutoModelForCausalLM
from tyro.conf import Positional

from dotmoe.common.files import write_json
from dotmoe.models.load import describe_dense
from dotmoe.run.folder import provenance


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Shape of the model, and where to write it."""

    out: Annotated[Positional[Path], tyro.conf.arg(metavar="OUT")]
    """Folder to write."""
    hidden_size: int = 896
    intermediate_size: int = 4_736
    num_hidden_layers: int = 4
    num_attention_heads: int = 14
    num_key_value_heads: int = 2


def main() -> None:
    settings = tyro.cli(Settings)
    described = describe_dense("embedded")
    shape, config = asdict(settings), described.config
    del shape["out"]
    for name, value in shape.items():
        setattr(config, name, value)
    config.head_dim = settings.hidden_size // settings.num_attention_heads
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(settings.out)
    described.tokenizer.save_pretrained(settings.out)
    record = {"origin": "measured", "shape": shape, "provenance": provenance(seed=0)}
    write_json(settings.out / "random_model.json", record)


if __name__ == "__main__":
    main()
