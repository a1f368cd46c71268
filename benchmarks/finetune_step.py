"""FLOPs and time of one finetuning step by k: sparse and masked FFNs against the dense model.

    taskset -c 0 python benchmarks/finetune_step.py            # some million parameters, CPU

FLOPs are counted by torch's own counter in forward and backward; it has no formula for grouped
products, so it is given one. Steps take turns, and each time is compared with the dense step of the
same round. The model is random, because neither result depends on what it has learned.
"""

from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dotmoe.cli.arguments import settings as settings_of
from dotmoe.method import sparse
from dotmoe.method.masked import masked, maskings_of
from dotmoe.method.router import Routing, router_losses
from random_models import Shape, random_dense, random_layout, random_tokens
from rounds import Clock, in_turns, keep, ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What to measure."""

    shape: Shape = field(default_factory=lambda: Shape(512, 2_048, 2, 8, 8, 4_096))
    experts: int = 16
    tokens: int = 512
    """Tokens of one step."""
    forms: tuple[str, ...] = ("sparse", "masked")
    rounds: int = 7
    threads: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    out: Path = Path("results/finetune_step.json")
    seed: int = 0


class TrainingStep:
    """A training step: forward and backward (dense, sparse or masked FFNs), and AdamW."""

    def __init__(self, settings: Settings, form: str, active_experts: int = 0) -> None:
        shape, seed, device = settings.shape, settings.seed, settings.device
        dense = random_dense(shape, dtype=getattr(torch, settings.dtype), device=device, seed=seed)
        self.routing: Routing | None = None
        self.changed, routers = ExitStack(), list[Tensor]()
        if form != "dense":
            layout = random_layout(shape, settings.experts, active_experts, seed)
            self.routing = Routing(active_experts=active_experts, surrogate="soft_top_k")
            masking = replace(maskings_of(dense, layout)[0], routing=self.routing)
            if form == "sparse":
                sparse.make_sparse(dense, layout, self.routing)
            else:
                routers = [nn.Parameter(layout.router_LED.to(device))]
                masking.router_LED = routers[0]
                self.changed.enter_context(masked(dense, [masking]))
        self.model = dense.model.requires_grad_(True)
        self.tokens_BT = random_tokens(shape, 2, settings.tokens // 2, seed).long().to(device)
        self.clock = Clock(dense.device)
        # Learning rate zero: the work is done, and the weights stay the same for the next round.
        self.optimizer = torch.optim.AdamW([*self.model.parameters(), *routers], lr=0.0)

    def loss(self) -> Tensor:
        """Next-token cross-entropy plus the router losses."""
        with router_losses() as losses:
            loss: Tensor = self.model(
                input_ids=self.tokens_BT, labels=self.tokens_BT, use_cache=False
            ).loss
        return loss if self.routing is None else loss + sum(losses().values())

    def flops(self) -> int:
        """FLOPs of forward and backward."""
        formulas = {torch.ops.aten._grouped_mm: grouped_flops}
        with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
            torch.autograd.backward(self.loss())
        return int(counter.get_total_flops())

    def seconds(self) -> dict[str, float]:
        """Seconds of forward and backward, and of both plus AdamW."""
        self.optimizer.zero_grad()
        with self.clock.part("step"):
            with self.clock.part("pass"):
                torch.autograd.backward(self.loss())
            self.optimizer.step()
        return self.clock.seconds()


def main() -> None:
    settings = settings_of(Settings, __doc__)
    torch.set_num_threads(settings.threads)
    counts = [k for k in (1, 2, 4, 8, 12, 16, 32, 64) if k < settings.experts]
    record = measured(settings, [*counts, settings.experts])
    for row in record["by_active_experts"]:
        print({name: value if name == "form" else f"{value:.4g}" for name, value in row.items()})
    keep(settings.out, record, settings.seed)


def measured(settings: Settings, counts: list[int]) -> dict[str, Any]:
    """One result row for each form of FFN at each k."""
    steps = {("dense", 0): TrainingStep(settings, "dense")}
    steps |= {(f, k): TrainingStep(settings, f, k) for k in counts for f in settings.forms}
    flops = {name: step.flops() for name, step in steps.items()}
    times = in_turns({name: step.seconds for name, step in steps.items()}, settings.rounds)
    dense, rows = times.pop(("dense", 0)), []
    for (form, count), mine in times.items():
        row: dict[str, Any] = {"form": form, "active_experts": count, "flops": flops[form, count]}
        row["flops_to_dense"] = row["flops"] / flops["dense", 0]
        for part in ("pass", "step"):
            one, other = ([each[part] for each in times] for times in (mine, dense))
            row |= {f"{part}_s": median(one), f"{part}_to_dense": ratio(one, other)}
        rows.append(row)
    return {
        "settings": {name: value for name, value in asdict(settings).items() if name != "out"},
        "dense": {"flops": flops["dense", 0], "step_s": median(one["step"] for one in dense)},
        "by_active_experts": rows,
    }


def grouped_flops(a_shape: torch.Size, b_shape: torch.Size, *_: object, **__: object) -> int:
    """FLOPs of aten::_grouped_mm: each row of the groups is multiplied by one matrix."""
    if len(b_shape) == 3:  # [R, A] with [E, A, B]
        return 2 * a_shape[0] * b_shape[1] * b_shape[2]
    return 2 * a_shape[0] * a_shape[1] * b_shape[1]  # [A, R] with [R, B]


if __name__ == "__main__":
    main()
