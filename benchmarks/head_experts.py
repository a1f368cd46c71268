"""Time and FLOPs per token against the number of active experts of query heads.

    taskset -c 0 python benchmarks/head_experts.py             # an attention of 16 heads, CPU

The exported architecture and the dense model take turns: decode with a KV cache, and prefill. FLOPs
come from torch's own counter. Weights are random, because neither result depends on their values.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import tyro
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from dotmoe.analyse.overhead import Clock
from dotmoe.models.modeling_dotmoe import DotMoeConfig, DotMoeForCausalLM
from random_models import Shape, default_dtype, llama_config, random_dense, random_tokens
from rounds import in_turns, keep, ratio, ratio_quartiles


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What to measure."""

    shape: Shape = field(default_factory=lambda: Shape(2_048, 5_632, 4, 16, 16, 4_096))
    experts: int = 8
    counts: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of active experts, k_attn."""
    context: int = 64
    """Tokens of the prefill, which are in the cache when decode begins."""
    steps: int = 8
    """Tokens decoded per round."""
    rounds: int = 7
    threads: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    out: Path = Path("results/head_experts.json")
    seed: int = 0


class Served:
    """A model that answers one request."""

    def __init__(self, model: Any, settings: Settings) -> None:
        self.model, self.steps = model, settings.steps
        self.clock = Clock(torch.device(settings.device))
        self.prompt = random_tokens(settings.shape, 1, settings.context, settings.seed)
        self.prompt = self.prompt.long().to(settings.device)

    @torch.no_grad()
    def seconds(self) -> dict[str, float]:
        """Seconds of a prefill, and of decoding one token."""
        cache, token = DynamicCache(config=self.model.config), self.prompt[:, :1]
        with self.clock.part("prefill"):
            self.model(self.prompt, past_key_values=cache, logits_to_keep=1)
        with self.clock.part("decode"):
            for _ in range(self.steps):
                self.model(token, past_key_values=cache)
        found = self.clock.seconds()
        return {"prefill": found["prefill"], "decode": found["decode"] / self.steps}

    @torch.no_grad()
    def flops(self) -> int:
        """FLOPs of a token without context: only products with weights."""
        with FlopCounterMode(display=False) as counter:
            self.model(self.prompt[:, :1], use_cache=False)
        return int(counter.get_total_flops())


def sparse(settings: Settings, active: int) -> nn.Module:
    """A random model of the shape, with heads assigned to experts at random."""
    shape, generator = settings.shape, torch.Generator().manual_seed(settings.seed)
    heads = [torch.randperm(shape.heads, generator=generator) for _ in range(shape.layers)]
    dense = llama_config(shape, attn_implementation="sdpa").to_dict()
    dense.pop("model_type")
    config = DotMoeConfig(
        dense_model_type="llama",
        heads_of_experts=[numbers.tolist() for numbers in heads],
        head_experts=settings.experts,
        num_experts_per_tok=active,
        **dense,
    )
    config._attn_implementation = "sdpa"
    with default_dtype(getattr(torch, settings.dtype)), torch.device(settings.device):
        model: nn.Module = DotMoeForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            nn.init.normal_(parameter, std=0.02, generator=None)
    return model.requires_grad_(False).eval()


def measured(settings: Settings) -> dict[str, Any]:
    """One result row for each k."""
    dtype = getattr(torch, settings.dtype)
    models: dict[Any, Any] = {"dense": random_dense(settings.shape, dtype=dtype).model}
    models |= {count: sparse(settings, count) for count in settings.counts}
    served = {name: Served(model.to(settings.device), settings) for name, model in models.items()}
    flops = {name: one.flops() for name, one in served.items()}
    turns: dict[str, Callable[[], dict[str, float]]] = {
        str(name): one.seconds for name, one in served.items()
    }
    times, rows = in_turns(turns, settings.rounds), []
    for count in settings.counts:
        row: dict[str, Any] = {"active_experts": count, "experts": settings.experts}
        row |= {"flops": flops[count], "flops_to_dense": flops[count] / flops["dense"]}
        for part in ("decode", "prefill"):
            mine, dense = ([each[part] for each in times[name]] for name in (str(count), "dense"))
            row |= {
                f"{part}_s": median(mine),
                f"{part}_to_dense": ratio(mine, dense),
                f"{part}_to_dense_quartiles": ratio_quartiles(mine, dense),
            }
        rows.append(row)
    return {
        "settings": {name: value for name, value in asdict(settings).items() if name != "out"},
        "dense": {
            "flops": flops["dense"],
            "decode_s": median(each["decode"] for each in times["dense"]),
        },
        "by_active_experts": rows,
    }


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    torch.set_num_threads(settings.threads)
    record = measured(settings)
    for row in record["by_active_experts"]:
        print({name: value for name, value in row.items() if "quartiles" not in name})
    keep(settings.out, record, settings.seed)


if __name__ == "__main__":
    main()
