"""Speed and memory of one alignment step, beside what no step can beat and a dense training step.

    python benchmarks/alignment_step.py --quick                  # a small model, CPU, a minute
    python benchmarks/alignment_step.py                          # the same, more rounds
    python benchmarks/alignment_step.py --preset qwen25_7b       # 7B widths, one GPU

Models are random and made on the device, since speed does not depend on what they have learned.
Each round measures the matmul rate, an alignment step without and with activation checkpointing,
and a dense training step, one after the other.
"""

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

import torch
import torch.nn.functional as F
import tyro

from alignment_step_subject import Step, Subject, peak_bytes, random_dense
from alignment_step_summary import show, summary
from dotmoe.analyse.overhead import Clock, mask_cost
from dotmoe.files import write_json
from dotmoe.granularity import ExpertsConfig, resolve
from dotmoe.models.dense import DenseModel
from dotmoe.moe.router import triton_runs_on
from dotmoe.provenance import provenance
from random_models import Shape

PRESETS = {
    "cpu": Subject(
        shape=Shape(width=512, ffn_width=2_368, layers=3, heads=8, kv_heads=2, vocabulary=8_192),
        experts=148,
        active=37,
        seq_len=256,
        micro_batch=2,
        micro_batches=2,
        dtype="float32",
        device="cpu",
    ),
    "qwen25_7b": Subject(
        shape=Shape(
            width=3_584, ffn_width=18_944, layers=28, heads=28, kv_heads=4, vocabulary=152_064
        ),
        experts=148,
        active=37,
        seq_len=2_048,
        micro_batch=4,
        micro_batches=4,
        dtype="bfloat16",
        device="cuda",
    ),
}
TOKEN_COUNTS = {"cpu": (256, 512, 1_024, 2_048), "qwen25_7b": (2_048, 4_096, 8_192, 16_384)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What to measure."""

    preset: Literal["cpu", "qwen25_7b"] = "cpu"
    layers: int | None = None
    """Fewer layers than the preset's."""
    micro_batches: int | None = None
    """Forward passes of one step; the assignment is paid once a step. Left out: the preset's."""
    rounds: int = 12
    quick: bool = False
    """Three rounds."""
    threads: int = 1
    out: Path | None = None
    """JSON to write. Left out: results/alignment_step_cpu.json or ..._qwen25_7b.json."""
    seed: int = 0


def main() -> None:
    settings = tyro.cli(Settings)
    torch.set_num_threads(settings.threads)
    subject = PRESETS[settings.preset]
    if subject.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"--preset {settings.preset} needs a CUDA device, and there is none here.")
    if settings.layers:
        subject = replace(subject, shape=replace(subject.shape, layers=settings.layers))
    subject = replace(subject, micro_batches=settings.micro_batches or subject.micro_batches)
    rounds = 3 if settings.quick else settings.rounds
    dense = random_dense(subject, settings.seed)
    record = {
        "origin": "measured",
        "subject": asdict(subject),
        "rounds": rounds,
        "clock": Clock(dense.device).kind,
        "steps": measured_steps(subject, dense, rounds, settings.seed),
        "straight_through_s": straight_through_seconds(subject, dense),
        "tokens": token_table(subject, dense, TOKEN_COUNTS[settings.preset], rounds, settings.seed),
        "peak_bytes": peaks(subject, dense, settings.seed),
        "triton_kernels": triton_runs_on(torch.zeros(1, device=dense.device)),
        "not_measured": not_measured(dense),
        "provenance": provenance(settings.seed),
    }
    record["summary"] = summary(record, subject, dense)
    show(record)
    name = "cpu" if settings.preset == "cpu" else settings.preset
    out = settings.out or Path(f"results/alignment_step_{name}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, record)


def measured_steps(
    subject: Subject, dense: DenseModel, rounds: int, seed: int
) -> dict[str, list[dict[str, float]]]:
    """Seconds of each part in every round, after one round that is not counted."""
    plain = Step(subject, dense, seed=seed)
    recomputed = Step(subject, dense, seed=seed, checkpointing=True)
    takers: dict[str, Callable[[], dict[str, float]]] = {
        "matmul": partial(matmul_flops_per_s, subject, dense.device),
        "alignment": partial(taken, plain),
        "alignment, checkpointing": partial(taken, recomputed),
        "dense training": partial(dense_step, subject, dense, plain),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in takers}
    for one in range(rounds + 1):
        for name, take in takers.items():
            seconds = take()
            if one:
                found[name].append(seconds)
    return found


def taken(step: Step) -> dict[str, float]:
    with step.ready():
        return step.take()


def matmul_flops_per_s(subject: Subject, device: torch.device) -> dict[str, float]:
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
    batch = plain.task.blocks.batch(0, plain.config.batch_size, 0).to(dense.device)
    try:
        with clock.part("step"):
            for rows in torch.split(batch, subject.micro_batch):
                with clock.part("forward and loss"):
                    loss = dense.model(input_ids=rows, labels=rows, use_cache=False).loss
                with clock.part("backward"):
                    (loss / subject.micro_batches).backward()
            with clock.part("optimizer"):
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
        return clock.seconds()
    except torch.OutOfMemoryError:
        return {"step": float("nan")}
    finally:
        dense.model.requires_grad_(False)
        for parameter in parameters:
            parameter.grad = None
        del optimizer
        gc.collect()


def straight_through_seconds(subject: Subject, dense: DenseModel) -> float:
    """What masks and their estimators cost a step, forward and backward, beyond the plain FFN."""
    split = resolve(
        ExpertsConfig(experts=subject.experts, active_experts=subject.active),
        subject.shape.ffn_width,
    )
    tokens = subject.seq_len * subject.micro_batch
    cost = mask_cost(dense, split, tokens, "soft_top_k", Clock(dense.device))
    return (cost.forward_s + cost.backward_s) * subject.shape.layers * subject.micro_batches


def token_table(
    subject: Subject, dense: DenseModel, counts: tuple[int, ...], rounds: int, seed: int
) -> list[dict[str, float]]:
    """Seconds of a step of one micro-batch of each size; the assignment apart, it has no tokens."""
    steps = {count: Step(subject.with_tokens(count), dense, seed=seed) for count in counts}
    found: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
    for one in range(rounds + 1):
        for count, step in steps.items():
            seconds = taken(step)
            if one:
                found[count].append(seconds)
    rows = []
    for count, samples in found.items():
        fixed = [s["assignment"] + s["optimizer"] for s in samples]
        rest = median(s["step"] - f for s, f in zip(samples, fixed, strict=True))
        rows.append(
            {
                "tokens": count,
                "step_s": median(s["step"] for s in samples),
                "assignment_and_optimizer_s": median(fixed),
                "rest_s": rest,
                "rest_us_per_token": 1e6 * rest / count,
            }
        )
    return rows


def peaks(subject: Subject, dense: DenseModel, seed: int) -> dict[str, int]:
    """Most bytes of tensors alive in a step, without and with checkpointing."""
    found = {}
    for name, checkpointing in (("plain", False), ("checkpointing", True)):
        step = Step(subject, dense, seed=seed, checkpointing=checkpointing)
        with step.ready():
            step.take()
            found[name] = peak_bytes(step)
        del step
        gc.collect()
    return found


def not_measured(dense: DenseModel) -> list[str]:
    """What this run cannot say."""
    if dense.device.type == "cuda":
        return []
    return [
        "speed and memory on a GPU: this run was on a CPU",
        "speed of the Triton kernels: they are tested in the interpreter, which says nothing of it",
        "the 7B shape: run --preset qwen25_7b on a GPU",
    ]


if __name__ == "__main__":
    main()
