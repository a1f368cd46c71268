"""Speed and memory of one alignment step, beside a dense training step.

    python benchmarks/alignment_step.py                          # a small model, CPU, minutes
    python benchmarks/alignment_step.py --preset qwen25_7b       # 7B widths, one GPU
    python benchmarks/alignment_step.py --solver sinkhorn        # the paper's solver

Models are random and made on the device, because speed does not depend on what they have learned.
Each round measures the machine's rates, an alignment step without and with activation
checkpointing, and a dense training step, one after the other.
"""

import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal
from unittest.mock import patch

import torch

from dotmoe.cli.arguments import settings as settings_of
from dotmoe.method.align import Alignment
from dotmoe.method.config import AlignConfig, AssignmentConfig
from dotmoe.method.granularity import Granularity
from dotmoe.method.masked import masked
from dotmoe.method.router import dense_only, router_losses
from dotmoe.method.state import AlignState
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.hooks import recomputing
from dotmoe.models.targets import TARGETS
from dotmoe.text.blocks import TokenBlocks
from dotmoe.training.loop import adamw, parameters_of
from random_models import QWEN25_7B, ROUTER_LOGIT_STD, Shape, random_dense, random_tokens
from rounds import Clock, in_turns, keep, medians, rates, ratio

AFFINITY_STD = 0.3
"""Deviation of random affinities: at temperature 0.1 as sharp as after some hundred steps."""
OF_ASSIGNMENT = ("assignment solve", "rounding", "assignment gradient")
OF_ADDED = (*OF_ASSIGNMENT, "optimizer")
"""Parts of an alignment step, beside the masks, that a dense training step does not have; the
optimizer is that of affinities and routers."""
NAMES = {"alignment": False, "alignment, checkpointing": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What is measured: a model shape, its split into experts, and the size of one step."""

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
    solver: Literal["newton", "sinkhorn"] = "newton"
    """Solver of the assignment: `sinkhorn` is the method of the paper."""

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
    """Number of layers, to use fewer than the preset."""
    solver: Literal["newton", "sinkhorn"] = "newton"
    rounds: int = 12
    threads: int = 1
    out: Path | None = None
    """JSON to write. Default: results/alignment_step_cpu.json or ..._qwen25_7b.json."""
    seed: int = 0


def main() -> None:
    settings = settings_of(Settings, __doc__)
    torch.set_num_threads(settings.threads)
    subject = replace(PRESETS[settings.preset], solver=settings.solver)
    if settings.layers:
        subject = replace(subject, shape=replace(subject.shape, layers=settings.layers))
    record = measured(subject, settings.rounds, settings.seed)
    for name, part_s in record["summary"]["parts_s"].items():
        print(f"{name:>20} {part_s:.4f} s {part_s / record['summary']['step_s']:>6.1%}")
    for name, value in record["summary"].items():
        print(f"{name}: {value}")
    keep(settings.out or f"results/alignment_step_{settings.preset}.json", record, settings.seed)


def measured(subject: Subject, rounds: int, seed: int, seconds: float = math.inf) -> dict[str, Any]:
    """Measurements of every round, the peaks of memory, and a summary.

    After `seconds` no round begins but the first.
    """
    dense = subject.dense(seed)
    step = Step(subject, dense, seed=seed)
    tokens, shape = subject.seq_len * subject.micro_batch, subject.shape
    ffn = (tokens, shape.width, shape.ffn_width), (tokens, shape.ffn_width, shape.width)
    subjects = {
        "rates": partial(rates, dense.device, getattr(torch, subject.dtype), *ffn),
        **{name: partial(step.taken, checkpointing=NAMES[name]) for name in NAMES},
        "dense training": partial(dense_step, subject, step),
    }
    record = {
        "subject": asdict(subject),
        "clock": Clock(dense.device).kind,
        "steps": in_turns(subjects, rounds, seconds),
        "peak_bytes": {name: step.peak_bytes(checkpointing=NAMES[name]) for name in NAMES},
        "straight_through_s": step.straight_through(),
    }
    return record | {"summary": summary(record, subject)}


class Step:
    """A repeatable optimizer step of the alignment."""

    def __init__(self, subject: Subject, dense: DenseModel, *, seed: int) -> None:
        self.dense = dense
        self.config = AlignConfig(
            batch_size=subject.batch, micro_batch_size=subject.micro_batch, warmup_ratio=0.0
        )
        tokens = random_tokens(subject.shape, 4 * subject.batch, subject.seq_len, seed)
        self.blocks = TokenBlocks(tokens)
        self.task = Alignment(
            dense,
            self.blocks,
            (random_state(subject, seed),),
            (subject.split,),
            self.config,
            AssignmentConfig(solver=subject.solver),
            seed=seed,
        )
        self.clock = Clock(dense.device)
        self.optimizer = adamw(self.task)
        self.parameters = [*parameters_of(self.optimizer).values()]
        self.steps = 0

    def taken(self, *, checkpointing: bool = False) -> dict[str, float]:
        """Seconds of each part of one step, and of the whole step as `step`."""
        masks = masked(self.dense, self.task.maskings)
        saved = recomputing(self.dense, checkpointing)
        watched = patch("torch.profiler.record_function", self.clock.part)
        with masks, saved, watched, self.clock.part("step"):
            self.task.accumulate_gradients(self.steps)
            with self.clock.part("optimizer"):
                torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
        self.steps += 1
        return self.clock.seconds()

    def straight_through(self) -> float:
        """Seconds that routing, masks and their estimators add to the FFNs of a step.

        A masked FFN runs with routing on and off, on random inputs: values do not affect the time.
        """
        dense, size = self.dense, self.config.micro_batch_size
        ffn = dense.family.block(dense.family.layers(dense.model)[0], TARGETS["ffn"])
        x = torch.randn(size * self.blocks.seq_len, dense.widths.model, device=dense.device)
        x = x.to(next(dense.model.parameters()).dtype).requires_grad_()
        self.task.begin(0)
        rounds = []
        with masked(dense, self.task.maskings):
            for _ in range(6):  # the first is not counted
                for is_on in (True, False):
                    with router_losses() as losses, nullcontext() if is_on else dense_only():
                        with self.clock.part(f"forward {is_on}"):
                            output = ffn(x)
                        outputs = [output, *(losses().values() if is_on else ())]
                    grads = [torch.randn_like(each) for each in outputs]
                    with self.clock.part(f"backward {is_on}"):
                        torch.autograd.backward(outputs, grads)
                rounds.append(self.clock.seconds())
        added = (
            median(r[f"{way} True"] - r[f"{way} False"] for r in rounds[1:])
            for way in ("forward", "backward")
        )
        passes = dense.widths.layers * self.config.batch_size // size
        return passes * sum(max(0.0, each) for each in added)

    def peak_bytes(self, *, checkpointing: bool = False) -> int | None:
        """Peak bytes of a step on a GPU, weights included, as the allocator counts them."""
        device = self.dense.device
        if device.type != "cuda":  # `simulated_memory.py` counts without one
            return None
        self.taken(checkpointing=checkpointing)
        torch.cuda.reset_peak_memory_stats(device)
        self.taken(checkpointing=checkpointing)
        return torch.cuda.max_memory_allocated(device)


def random_state(subject: Subject, seed: int) -> AlignState:
    """Random affinities and routers with the spread that they have in a run."""
    shape, device = subject.shape, torch.device(subject.device)
    generator = torch.Generator(device).manual_seed(seed)
    affinity_size = (shape.layers, shape.ffn_width, subject.experts)
    router_size = (shape.layers, subject.experts, shape.width)
    affinity = torch.randn(affinity_size, generator=generator, device=device)
    router = torch.randn(router_size, generator=generator, device=device)
    return AlignState(
        affinity_LNE=affinity.mul_(AFFINITY_STD),
        router_LED=router.mul_(ROUTER_LOGIT_STD / shape.width**0.5),
    )


def dense_step(subject: Subject, step: Step) -> dict[str, float]:
    """A dense training step of the same model and tokens; `at_once` sequences per forward pass."""
    at_once = subject.micro_batch
    while at_once:
        try:
            return {"step": trained_step(step, at_once), "at_once": at_once}
        except torch.OutOfMemoryError:
            at_once //= 2
    return {"step": float("inf"), "at_once": 0}


def trained_step(step: Step, at_once: int) -> float:
    """Seconds of forward, full backward and AdamW."""
    model, clock, batch_size = step.dense.model, Clock(step.dense.device), step.config.batch_size
    model.requires_grad_(True)
    # Learning rate zero: the work is done, and the weights stay the same for the next round.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    batch = step.blocks.batch(0, batch_size, 0).to(step.dense.device)
    try:
        with clock.part("step"):
            for rows in torch.split(batch, at_once):
                loss = model(input_ids=rows, labels=rows, use_cache=False).loss
                (loss * len(rows) / batch_size).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return clock.seconds()["step"]
    finally:
        optimizer.zero_grad()
        model.requires_grad_(False)


def summary(record: dict[str, Any], subject: Subject) -> dict[str, Any]:
    """Medians over rounds of seconds and of the ratios within each round."""
    rounds = record["steps"]
    plain, again, dense_s = ([one["step"] for one in rounds[n]] for n in (*NAMES, "dense training"))
    parts, tokens = medians(rounds["alignment"]), subject.batch * subject.seq_len
    step_s = parts.pop("step")
    of_assignment = sum(parts[name] for name in OF_ASSIGNMENT)
    added = {name: [one[name] for one in rounds["alignment"]] for name in OF_ADDED}
    added["straight-through"] = [record["straight_through_s"]] * len(plain)
    added["all"] = [sum(each) for each in zip(*added.values(), strict=True)]
    return {
        "tokens": tokens,
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "parts_s": parts,
        **medians(rounds["rates"]),
        "dense_training_step_s": median(dense_s),
        "ratio_to_dense_training": ratio(plain, dense_s),
        "added_over_dense_training": {name: ratio(each, dense_s) for name, each in added.items()},
        "checkpointing_ratio": ratio(again, plain),
        "assignment_share": of_assignment / step_s,
        "method_share": (of_assignment + record["straight_through_s"]) / step_s,
    }


if __name__ == "__main__":
    main()
