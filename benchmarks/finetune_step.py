"""Work and time of one finetuning step against k, beside a step of the dense model.

    taskset -c 0 python benchmarks/finetune_step.py            # some million parameters, CPU

FLOPs are those that torch's own counter sees in forward and backward; the counter has no formula
for grouped products, so it is given one, and is checked against the loop over experts, whose plain
products it knows. Steps take turns, and each time is compared with the dense step's of the same
round. The model is random, since neither depends on what it has learned.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
import tyro
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dotmoe.moe import sparse
from dotmoe.moe.router import Routing
from random_models import Shape, random_dense, random_layout, random_tokens
from rounds import in_turns, keep, ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What to measure."""

    width: int = 512
    ffn_width: int = 2_048
    layers: int = 2
    vocabulary: int = 4_096
    experts: int = 16
    tokens: int = 512
    """Of one step."""
    rounds: int = 7
    threads: int = 1
    out: Path = Path("results/finetune_step.json")
    seed: int = 0

    @property
    def shape(self) -> Shape:
        """Of the model, with heads of 64."""
        heads = self.width // 64
        return Shape(
            width=self.width,
            ffn_width=self.ffn_width,
            layers=self.layers,
            heads=heads,
            kv_heads=heads,
            vocabulary=self.vocabulary,
        )


class TrainingStep:
    """Forward and backward of a model, dense or with sparse FFNs, and AdamW."""

    def __init__(self, settings: Settings, active_experts: int | None) -> None:
        dense = random_dense(settings.shape, seed=settings.seed)
        self.model: nn.Module = dense.model.requires_grad_(True)
        self.routing: Routing | None = None
        if active_experts is not None:
            layout = random_layout(settings.shape, settings.experts, active_experts, settings.seed)
            self.routing = Routing(
                active_experts=active_experts, surrogate="soft_top_k", surrogate_temperature=1.0
            )
            sparse.make_sparse(dense, layout, self.routing)
            dense.model.requires_grad_(True)
        tokens = random_tokens(settings.shape, 2, settings.tokens // 2, settings.seed)
        self.tokens_BT = tokens.long()
        # A rate of zero: the work is done, and the weights stay as they are for the next round.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0)

    def loss(self) -> Tensor:
        """Next-token cross-entropy, and the losses of the routers."""
        if self.routing is not None:
            self.routing.want_losses()
        loss: Tensor = self.model(
            input_ids=self.tokens_BT, labels=self.tokens_BT, use_cache=False
        ).loss
        return loss if self.routing is None else loss + sum(self.routing.pop_losses())

    def flops(self) -> int:
        """FLOPs of forward and backward."""
        formulas = {torch.ops.aten._grouped_mm: grouped_flops}
        with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
            self.loss().backward()
        return counter.get_total_flops()

    def seconds(self) -> dict[str, float]:
        """Of forward and backward, and of these and AdamW."""
        self.optimizer.zero_grad()
        start = perf_counter()
        self.loss().backward()
        middle = perf_counter()
        self.optimizer.step()
        return {"pass_s": middle - start, "step_s": perf_counter() - start}


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    torch.set_num_threads(settings.threads)
    counts = [k for k in (1, 2, 4, 8, 12, 16, 32, 64) if k < settings.experts]
    counts.append(settings.experts)
    steps = {"dense": TrainingStep(settings, None)}
    steps |= {str(k): TrainingStep(settings, k) for k in counts}
    dense_flops = steps["dense"].flops()
    times = in_turns({name: step.seconds for name, step in steps.items()}, settings.rounds)
    rows = []
    for k in counts:
        mine, of_dense = (
            {part: [one[part] for one in times[name]] for part in ("pass_s", "step_s")}
            for name in (str(k), "dense")
        )
        row: dict[str, Any] = counted(settings, k, steps[str(k)], dense_flops)
        row |= {part: median(values) for part, values in mine.items()}
        row["pass_to_dense"] = ratio(mine["pass_s"], of_dense["pass_s"])
        row["step_to_dense"] = ratio(mine["step_s"], of_dense["step_s"])
        rows.append(row)
    show(rows)
    record = {
        "settings": {name: value for name, value in asdict(settings).items() if name != "out"},
        "dense": {"flops": dense_flops},
        "by_active_experts": rows,
    }
    keep(settings.out, record, settings.seed)


def grouped_flops(a_shape: tuple, b_shape: tuple, *_: object, **__: object) -> int:
    """Of aten::_grouped_mm: each row of the groups meets one matrix, whatever their number."""
    if len(b_shape) == 3:  # [R, A] with [E, A, B]
        return 2 * a_shape[0] * b_shape[1] * b_shape[2]
    return 2 * a_shape[0] * a_shape[1] * b_shape[1]  # [A, R] with [R, B]


def counted(settings: Settings, k: int, step: TrainingStep, dense_flops: int) -> dict[str, float]:
    """FLOPs of a step: as counted, by the loop over experts, and by hand."""
    without_grouped: Callable[..., bool] = lambda dtype, *widths: False  # noqa: E731
    flops = step.flops()
    with patch.object(sparse, "runs_grouped", without_grouped):
        of_the_loop = step.flops()
    # Three products of 2 T D n FLOPs forward; backward twice that. Routers are E rows.
    a_neuron = 3 * 3 * 2 * settings.tokens * settings.width * settings.layers
    neurons = settings.ffn_width // settings.experts * k
    routers = 3 * 2 * settings.tokens * settings.width * settings.experts * settings.layers
    elsewhere = dense_flops - a_neuron * settings.ffn_width
    return {
        "active_experts": k,
        "flops": flops,
        "flops_of_the_loop": of_the_loop,
        "flops_by_hand": elsewhere + routers + a_neuron * neurons,
        "flops_to_dense": flops / dense_flops,
    }


def show(rows: list[dict[str, Any]]) -> None:
    print("  k   FLOPs/dense   forward and backward/dense   step/dense   by hand  by loop")
    for row in rows:
        print(
            f"{row['active_experts']:>3}   {row['flops_to_dense']:>11.3f}   "
            f"{row['pass_to_dense']:>26.3f}   {row['step_to_dense']:>10.3f}   "
            f"{row['flops'] == row['flops_by_hand']!s:>7}  "
            f"{row['flops'] == row['flops_of_the_loop']!s:>7}"
        )


if __name__ == "__main__":
    main()
