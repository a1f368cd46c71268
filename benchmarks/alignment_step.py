"""Speed and memory of one alignment step, beside what no step can beat and a dense training step.

    python benchmarks/alignment_step.py                          # a small model, CPU, minutes
    python benchmarks/alignment_step.py --preset qwen25_7b       # 7B widths, one GPU

Models are random and made on the device, since speed does not depend on what they have learned.
Each round measures the matmul rate, an alignment step without and with activation checkpointing,
and a dense training step, one after the other.
"""

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dotmoe.align import AlignConfig, Alignment
from dotmoe.analyse.overhead import OF_ASSIGNMENT, OF_TASK, Clock, time_methods
from dotmoe.data import TokenBlocks
from dotmoe.granularity import Granularity
from dotmoe.inspection.planner import products
from dotmoe.inspection.sizes import Step as PlannedStep
from dotmoe.inspection.sizes import sizes_of
from dotmoe.models.dense import DenseModel
from dotmoe.moe.assignment import AlignState, AssignmentConfig
from dotmoe.moe.masked import masked, recomputing
from dotmoe.training.loop import adamw
from random_models import QWEN25_7B, ROUTER_LOGIT_STD, Shape, random_dense, random_tokens
from rounds import in_turns, keep, medians, ratio, require_device

AFFINITY_STD = 0.3
"""Of the random affinities: at temperature 0.1 a plan as sharp as after some hundred steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A shape, its split, and one step."""

    shape: Shape
    experts: int = 148
    active: int = 37
    seq_len: int = 256
    micro_batch: int = 2
    """Sequences of one forward pass."""
    micro_batches: int = 1
    """Forward passes of one optimizer step."""
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def batch(self) -> int:
        """Sequences of one step."""
        return self.micro_batch * self.micro_batches

    @property
    def split(self) -> Granularity:
        """Experts of every layer."""
        return Granularity(
            num_experts=self.experts,
            expert_size=self.shape.ffn_width // self.experts,
            active_experts=self.active,
        )

    def dense(self, seed: int) -> DenseModel:
        """The random model."""
        shape = replace(self.shape, context=max(self.shape.context, self.seq_len))
        dtype = getattr(torch, self.dtype)
        return random_dense(shape, dtype=dtype, device=self.device, seed=seed)

    def planned(self, dense: DenseModel, *, checkpointing: bool = False) -> PlannedStep:
        """What the estimates of `dotmoe inspect` read."""
        dtype = getattr(torch, self.dtype)
        sizes = sizes_of(
            dense.config,
            dense.family,
            self.split,
            stored=dtype,
            written=dtype,
            held=dtype.itemsize,
        )
        return PlannedStep(
            sizes=sizes,
            batch_size=self.batch,
            seq_len=self.seq_len,
            micro_batch_size=self.micro_batch,
            on_cpu=self.device == "cpu",
            checkpointing=checkpointing,
        )


SMALL = Subject(
    shape=Shape(width=512, ffn_width=2_368, layers=3, heads=8, kv_heads=2, vocabulary=8_192)
)
PRESETS = {
    "cpu": replace(SMALL, micro_batches=2),
    "qwen25_7b": Subject(
        shape=QWEN25_7B,
        seq_len=2_048,
        micro_batch=4,
        micro_batches=4,
        dtype="bfloat16",
        device="cuda",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What to measure."""

    preset: Literal["cpu", "qwen25_7b"] = "cpu"
    layers: int | None = None
    """Fewer layers than the preset's."""
    rounds: int = 12
    threads: int = 1
    out: Path | None = None
    """JSON to write. Left out: results/alignment_step_cpu.json or ..._qwen25_7b.json."""
    seed: int = 0


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    torch.set_num_threads(settings.threads)
    subject = PRESETS[settings.preset]
    require_device(subject.device)
    if settings.layers:
        subject = replace(subject, shape=replace(subject.shape, layers=settings.layers))
    dense = subject.dense(settings.seed)
    plain = Step(subject, dense, seed=settings.seed)
    recomputed = Step(subject, dense, seed=settings.seed, checkpointing=True)
    found = in_turns(
        {
            "matmul": partial(matmul_rate, subject, dense.device),
            "alignment": plain.taken,
            "alignment, checkpointing": recomputed.taken,
            "dense training": partial(dense_step, subject, dense, plain),
        },
        settings.rounds,
    )
    record = {
        "subject": asdict(subject),
        "rounds": settings.rounds,
        "clock": Clock(dense.device).kind,
        "steps": found,
        "peak_bytes": {"plain": plain.peak_bytes(), "checkpointing": recomputed.peak_bytes()},
    }
    record["summary"] = summary(record, subject, dense)
    show(record)
    keep(settings.out or f"results/alignment_step_{settings.preset}.json", record, settings.seed)


class Step:
    """One optimizer step of the alignment, again and again."""

    def __init__(
        self, subject: Subject, dense: DenseModel, *, seed: int, checkpointing: bool = False
    ) -> None:
        self.dense = dense
        self.config = AlignConfig(
            batch_size=subject.batch,
            micro_batch_size=subject.micro_batch,
            activation_checkpointing=checkpointing,
        )
        tokens = random_tokens(subject.shape, 4 * subject.batch, subject.seq_len, seed)
        self.blocks = TokenBlocks(tokens)
        self.task = Alignment(
            dense,
            self.blocks,
            random_state(subject, seed),
            subject.split,
            self.config,
            AssignmentConfig(),
            warmup_steps=0,
            seed=seed,
        )
        self.clock = Clock(dense.device)
        time_methods(self.task, OF_TASK, self.clock)
        time_methods(self.task.assignment, OF_ASSIGNMENT, self.clock)
        groups = self.task.parameter_groups()
        self.parameters = [p for group in groups for p in group.parameters.values()]
        self.optimizer = adamw(groups, weight_decay=self.config.weight_decay)
        self.steps = 0

    def taken(self) -> dict[str, float]:
        """Seconds of the parts of one step, and of all of it as `step`."""
        masks = masked(self.dense, self.task.routing)
        saved = recomputing(self.dense, self.config.activation_checkpointing)
        with masks, saved, self.clock.part("step"):
            self.task.accumulate_gradients(self.steps)
            with self.clock.part("optimizer"):
                torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
        self.steps += 1
        return self.clock.seconds()

    def peak_bytes(self) -> int:
        """Most bytes of tensors that are alive at once during a step, weights included.

        On CUDA what the allocator counts. On a CPU what it hands out beyond the tensors that are
        there before the step.
        """
        self.taken()
        device = self.dense.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.taken()
            return torch.cuda.max_memory_allocated(device)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            self.taken()
        alive = most = 0
        for event in sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
            if event.name() == "[memory]":
                alive += event.nbytes()
                most = max(most, alive)
        return self._held_bytes() + most

    def _held_bytes(self) -> int:
        tensors = [*self.dense.model.parameters(), *self.dense.model.buffers(), *self.parameters]
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        tensors += [value for value in self.task.state().values() if isinstance(value, Tensor)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())


def random_state(subject: Subject, seed: int) -> AlignState:
    """Affinities and routers as spread as those of a run."""
    shape, device = subject.shape, torch.device(subject.device)
    generator = torch.Generator(device).manual_seed(seed)
    affinity_size = (shape.layers, shape.ffn_width, subject.experts)
    router_size = (shape.layers, subject.experts, shape.width)
    affinity = torch.randn(affinity_size, generator=generator, device=device)
    router = torch.randn(router_size, generator=generator, device=device)
    return AlignState(
        affinity_LNE=affinity.mul_(AFFINITY_STD),
        router_LED=router.mul_(ROUTER_LOGIT_STD / shape.width**0.5),
        step=0,
    )


def matmul_rate(subject: Subject, device: torch.device) -> dict[str, float]:
    """Rate of the best of three products: square, and those of one FFN of the subject."""
    dtype = getattr(torch, subject.dtype)
    side = 512 if device.type == "cpu" else 8_192
    tokens = subject.seq_len * subject.micro_batch
    width, neurons = subject.shape.width, subject.shape.ffn_width
    clock, best = Clock(device), 0.0
    for rows, inner, columns in ((side,) * 3, (tokens, width, neurons), (tokens, neurons, width)):
        # Varied entries: a GPU multiplies constants faster than it would real data.
        left = torch.randn(rows, inner, device=device).to(dtype)
        right = torch.randn(columns, inner, device=device).to(dtype)
        for _ in range(4):
            with clock.part("product"):
                F.linear(left, right)
            best = max(best, 2 * rows * inner * columns / clock.seconds()["product"])
    return {"flops_per_s": best}


def dense_step(subject: Subject, dense: DenseModel, plain: Step) -> dict[str, float]:
    """The same model and tokens with its weights trained: forward, full backward, AdamW."""
    clock = Clock(dense.device)
    dense.model.requires_grad_(True)
    parameters = list(dense.model.parameters())
    # A rate of zero: the work is done, and the weights stay as they are for the next round.
    optimizer = torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0)
    batch = plain.blocks.batch(0, subject.batch, 0).to(dense.device)
    try:
        with clock.part("step"):
            for rows in torch.split(batch, subject.micro_batch):
                loss = dense.model(input_ids=rows, labels=rows, use_cache=False).loss
                (loss / subject.micro_batches).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
        return clock.seconds()
    except torch.OutOfMemoryError:
        return {"step": float("nan")}
    finally:
        optimizer.zero_grad()
        dense.model.requires_grad_(False)


def summary(record: dict[str, Any], subject: Subject, dense: DenseModel) -> dict[str, Any]:
    """Medians over rounds of seconds and of the ratios within each round."""
    rounds = record["steps"]
    unavoidable = sum(products(subject.planned(dense)).values())
    rates = [one["flops_per_s"] for one in rounds["matmul"]]
    plain, again, dense_s = (
        [one["step"] for one in rounds[name]]
        for name in ("alignment", "alignment, checkpointing", "dense training")
    )
    parts = medians(rounds["alignment"])
    step_s = parts.pop("step")
    tokens = subject.batch * subject.seq_len
    of_assignment = sum(parts[name] for name in OF_ASSIGNMENT.values())
    return {
        "tokens": tokens,
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "parts_s": parts,
        "matmul_flops_per_s": max(rates),
        "unavoidable_flops": unavoidable,
        "share_of_lower_bound": ratio([unavoidable / rate for rate in rates], plain),
        "dense_training_step_s": median(dense_s),
        "ratio_to_dense_training": ratio(plain, dense_s),
        "checkpointing_ratio": ratio(again, plain),
        "assignment_share": of_assignment / step_s,
    }


def show(record: dict[str, Any]) -> None:
    found = record["summary"]
    for name, seconds in found["parts_s"].items():
        print(f"{name:>20} {seconds:.4f} s {seconds / found['step_s']:>6.1%}")
    for name, value in found.items():
        if name != "parts_s":
            print(f"{name}: {value:.4g}")
    print(f"peak bytes: {record['peak_bytes']}")


if __name__ == "__main__":
    main()
