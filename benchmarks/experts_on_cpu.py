"""Experts of an export on a CPU: all at once beside Transformers' grouped products, in turns.

    python benchmarks/experts_on_cpu.py results/experts_on_cpu.json

Exports as dotmoe writes them by default, with random weights and four layers. The figure is the
ratio of CPU times within a round, so that other work on the machine matters less.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Glm4MoeConfig

from dotmoe.models.experts_on_cpu import use_all_at_once, use_stock
from rounds import Clock, in_turns, keep, ratio

ROUNDS = 5
THREADS = 1


class Shape(NamedTuple):
    """The sizes of an export."""

    name: str
    width: int
    heads: int
    experts: int
    size: int
    active: int
    shared: int


SHAPES = (
    Shape("SmolLM2-135M, three quarters", 576, 9, 30, 32, 18, 576),
    Shape("Qwen2.5-0.5B, three quarters", 896, 14, 24, 128, 15, 1_792),
    Shape("Qwen2.5-1.5B, three quarters", 1_536, 12, 44, 128, 27, 3_328),
)
TASKS = {"reading 1 x 512 tokens": (1, 512), "a token of 24 sequences": (24, 1)}


def main() -> None:
    torch.set_num_threads(THREADS)
    cases = [(shape, dtype) for shape in SHAPES for dtype in ("float32", "bfloat16")]
    rows = [row for case in cases for row in of(*case)]
    for row in rows:
        print(f"{row['model']}, {row['dtype']}, {row['task']}: {row['ratio']:.2f} times as fast")
    if len(sys.argv) > 1:
        keep(sys.argv[1], {"rounds": ROUNDS, "rows": rows})


def of(shape: Shape, dtype: str) -> Iterator[dict[str, Any]]:
    """A row for each task: how much faster all experts at once are."""
    model = export_of(shape, getattr(torch, dtype))
    for task, (rows, tokens) in TASKS.items():
        tokens_BT = torch.randint(0, 1_000, (rows, tokens))
        seconds = in_turns(
            {
                choose: partial(seconds_of, model, choose, tokens_BT)
                for choose in (use_stock, use_all_at_once)
            },
            ROUNDS,
        )
        faster = ratio(seconds[use_stock], seconds[use_all_at_once])
        yield {"model": shape.name, "dtype": dtype, "task": task, "ratio": round(faster, 3)}


def export_of(shape: Shape, dtype: torch.dtype) -> Any:
    """A model of this shape as format glm4_moe has it."""
    config = Glm4MoeConfig(
        hidden_size=shape.width,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=64,
        num_hidden_layers=4,
        vocab_size=1_000,
        n_routed_experts=shape.experts,
        moe_intermediate_size=shape.size,
        num_experts_per_tok=shape.active,
        n_shared_experts=shape.shared // shape.size,
        first_k_dense_replace=0,
        dtype=dtype,
    )
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


@torch.no_grad()
def seconds_of(model: Any, choose: Callable[[Any], None], tokens_BT: Tensor) -> float:
    """CPU time of one forward pass with the experts so."""
    choose(model)
    clock = Clock(tokens_BT.device)
    with clock.part("pass"):
        model(input_ids=tokens_BT)
    return clock.seconds()["pass"]


if __name__ == "__main__":
    main()
