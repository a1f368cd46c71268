"""Work and time of one finetuning step against k, beside a step of the dense model.

    taskset -c 0 python benchmarks/finetune_step.py            # some million parameters, CPU

FLOPs are those that torch's own counter sees in forward and backward; it has no formula for grouped
products, so it is given one. Steps take turns, and each time is compared with the dense step's of
the same round. The model is random, since neither depends on what it has learned.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import tyro
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dotmoe.moe import sparse
from dotmoe.moe.router import Routing
from random_models import Shape, random_dense, random_layout, random_tokens
from rounds import in_turns, keep, ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What to measure."""

    shape: Shape = field(default_factory=lambda: Shape(512, 2_048, 2, 8, 8, 4_096))
    experts: int = 16
    tokens: int = 512
    """Of one step."""
    rounds: int = 7
    threads: int = 1
    out: Path = Path("results/finetune_step.json")
    seed: int = 0


class TrainingStep:
    """Forward and backward of a model, dense or with sparse FFNs, and AdamW."""

    def __init__(self, settings: Settings, active_experts: int | None) -> None:
        shape, seed = settings.shape, settings.seed
        dense = random_dense(shape, seed=seed)
        self.routing: Routing | None = None
        if active_experts is not None:
            self.routing = Routing(
                active_experts=active_experts, surrogate="soft_top_k", surrogate_temperature=1.0
            )
            layout = random_layout(shape, settings.experts, active_experts, seed)
            sparse.make_sparse(dense, layout, self.routing)
        self.model = dense.model.requires_grad_(True)
        self.tokens_BT = random_tokens(shape, 2, settings.tokens // 2, seed).long()
        # A rate of zero: the work is done, and the weights stay as they are for the next round.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0)

    def loss(self) -> Tensor:
        """Next-token cross-entropy, and the losses of the routers."""
        if self.routing is not None:
            self.routing.losses = []
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
        return {"pass": middle - start, "step": perf_counter() - start}


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    torch.set_num_threads(settings.threads)
    counts = [k for k in (1, 2, 4, 8, 12, 16, 32, 64) if k < settings.experts]
    counts.append(settings.experts)
    steps = {"dense": TrainingStep(settings, None)}
    steps |= {str(k): TrainingStep(settings, k) for k in counts}
    flops = {name: step.flops() for name, step in steps.items()}
    times = in_turns({name: step.seconds for name, step in steps.items()}, settings.rounds)
    rows = []
    for name in map(str, counts):
        row = {"active_experts": int(name), "flops": flops[name]}
        row["flops_to_dense"] = flops[name] / flops["dense"]
        for part in ("pass", "step"):
            mine, dense = ([one[part] for one in times[who]] for who in (name, "dense"))
            row |= {f"{part}_s": median(mine), f"{part}_to_dense": ratio(mine, dense)}
        rows.append(row)
        print({key: float(f"{value:.4g}") for key, value in row.items()})
    record = {
        "settings": {name: value for name, value in asdict(settings).items() if name != "out"},
        "dense": {"flops": flops["dense"]},
        "by_active_experts": rows,
    }
    keep(settings.out, record, settings.seed)


def grouped_flops(a_shape: tuple, b_shape: tuple, *_: object, **__: object) -> int:
    """Of aten::_grouped_mm: each row of the groups meets one matrix, whatever their number."""
    if len(b_shape) == 3:  # [R, A] with [E, A, B]
        return 2 * a_shape[0] * b_shape[1] * b_shape[2]
    return 2 * a_shape[0] * a_shape[1] * b_shape[1]  # [A, R] with [R, B]


if __name__ == "__main__":
    main()
