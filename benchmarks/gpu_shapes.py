"""Times and memory at the sizes of Qwen2.5-7B, random weights, beside the estimates.

A part of `gpu.py`: a step of alignment with the paper's settings and with ours, beside a dense
training step; start from data and repair of one layer; a step of finetuning; and one exported FFN
in stock Transformers beside the dense one. Times of layers are given by layer.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.utils.benchmark import Timer

import alignment_step
from alignment_step import Subject
from dotmoe.measure.inspection.accelerators import ACCELERATORS, Accelerator, measured_here
from dotmoe.measure.inspection.planned_stages import Stages
from dotmoe.measure.inspection.planner import seconds
from dotmoe.method.calibrate import calibrate
from dotmoe.method.config import (
    AssignmentConfig,
    CalibrateConfig,
    ExpertsConfig,
    FinetuneConfig,
    RepairConfig,
)
from dotmoe.method.extract import extract
from dotmoe.method.finetuning import finetune
from dotmoe.method.granularity import DEFAULT_ACTIVE, resolve
from dotmoe.method.repair import repair, repair_tokens
from dotmoe.models.config import LoadConfig
from dotmoe.models.load import describe_dense, load_dense
from dotmoe.run.config import recipe
from dotmoe.text.blocks import TokenBlocks
from gpu_part import Part, asked
from random_models import Shape, random_dense, random_layout, random_tokens, write_random_dense
from simulated_memory import compared, planned, simulated, sizes_of, step_of
from throughput_by_granularity import random_moe

TINY = Subject(
    shape=Shape(64, 192, 2, 4, 2, 2_048, 256),
    experts=8,
    active=2,
    seq_len=32,
    micro_batches=2,
    dtype="bfloat16",  # as on a GPU
)
# A GPU's share of the paper's 64 sequences on 8 GPUs.
WHOLE = replace(alignment_step.PRESETS["qwen25_7b"], micro_batches=2)
TUNED_LAYERS = 2
"""Layers of the finetuning, whose weights in training would not all fit."""
ROUND_SECONDS = 30
"""After so many seconds no round of an alignment begins but the first that counts."""
BATCHES = (1, 4, 16, 64, 256, 512)
"""Tokens that an FFN computes at once, one of each sequence."""


def main() -> None:
    options = asked(__doc__)
    subject = TINY if options.tiny else WHOLE
    subject = replace(subject, device=options.device)
    part = Part("shapes", options)
    simulation = None if options.tiny else started_simulation()
    part.measure("machine", partial(found_machine, subject), most=20)
    machine, paper = accelerator(subject), replace(subject, solver="sinkhorn")
    part.measure("alignment, paper", partial(alignment, paper, machine), most=80)
    part.measure("exported layer", partial(exported_layer, subject), most=30)
    part.measure("layer", partial(one_layer, subject, machine), most=70)
    part.measure("finetuning", partial(finetuning, subject, machine), most=50)
    part.measure("alignment, ours", partial(alignment, subject, machine), most=60)
    if simulation:
        part.measure("simulated", partial(ended, simulation), most=20)


def found_machine(subject: Subject) -> dict[str, Any]:
    """Rates of this machine, as `dotmoe inspect` measures them."""
    here = measured_here(torch.device(subject.device), getattr(torch, subject.dtype))
    return {
        "name": here.name,
        "flops_per_s": here.flops_per_s,
        "single_flops_per_s": here.single_flops_per_s,
        "bytes_per_s": here.bytes_per_s,
        "memory_bytes": here.memory_bytes,
    }


def accelerator(subject: Subject) -> Accelerator:
    """The known GPU type whose name this machine's contains, else this machine as measured."""
    if subject.device != "cpu":
        name = torch.cuda.get_device_name().lower()
        known = [each for key, each in ACCELERATORS.items() if key in name]
        if known:
            return known[0]
    return measured_here(torch.device(subject.device), getattr(torch, subject.dtype))


def alignment(subject: Subject, machine: Accelerator) -> dict[str, Any]:
    """A step of alignment, its parts and what it adds to a dense step, and the estimates of both.

    The estimates are for our solver; their shares of a step do not know the paper's.
    """
    record = alignment_step.measured(subject, rounds=5, seed=0, seconds=ROUND_SECONDS)
    sizes = sizes_of(subject.shape, subject.shape.layers)
    step = step_of(sizes, "assignment", at_once=subject.micro_batch, seq_len=subject.seq_len)
    estimated = seconds(held_as(step, machine), machine)
    return {
        "summary": record["summary"],
        "rounds": len(record["steps"]["alignment"]),
        "peak_bytes": record["peak_bytes"],
        "estimated": {
            "machine": machine.name,
            "step_s": sum(estimated.values()),
            "parts_s": estimated,
            "peak_bytes": planned(held_as(step, machine)),
        },
    }


def held_as(step: Any, machine: Accelerator) -> Any:
    """A step of the planner as a machine holds weights."""
    return replace(step, weight_bytes=machine.weight_bytes, on_cpu=machine.on_cpu)


def one_layer(subject: Subject, machine: Accelerator) -> dict[str, Any]:
    """Seconds of the start from data and of the repair of one layer, at the default tokens."""
    shape = replace(subject.shape, layers=1, vocabulary=8_192)
    sizes, split = sizes_of(shape, 1), subject.split
    tokens = repair_tokens(RepairConfig(), (split,), sizes.config)
    blocks = TokenBlocks(random_tokens(shape, -(-tokens // subject.seq_len), subject.seq_len, 1))
    found: dict[str, Any] = {"tokens": tokens}
    with TemporaryDirectory() as scratch:
        source = written(shape, subject, Path(scratch) / "dense")
        dense = load_dense(source, load_of(subject))
        with measured_peak(subject.device, found, "start"):
            state = calibrate(dense, blocks, split, CalibrateConfig(), AssignmentConfig(), seed=0)
        layout, folder = extract(state, split, AssignmentConfig()), Path(scratch) / "repaired"
        with measured_peak(subject.device, found, "repair"):
            record = repair(dense, (layout,), blocks, RepairConfig(), seed=0, folder=folder)
    plan = Stages(sizes, recipe(model="", out="")).on(machine, None)["stages"]
    hours = {stage["stage"]: stage["hours"] for stage in plan}
    return found | {
        "heldout_error": record["layers"][0]["heldout_error"],
        "estimated": {
            "machine": machine.name,
            "start_s": 3_600 * hours["start from data"],
            "repair_s": 3_600 * hours["repair"],
            "repair_peak_bytes": planned(step_of(sizes, "repair")),
        },
    }


def written(shape: Shape, subject: Subject, folder: Path) -> str:
    """The folder of a random model, which the device makes."""
    dtype = getattr(torch, subject.dtype)
    write_random_dense(shape, folder, dtype, seed=0, device=subject.device)
    return str(folder)


def load_of(subject: Subject) -> LoadConfig:
    """Dtype and device of the measured model."""
    return LoadConfig(device=subject.device, dtype=subject.dtype)  # type: ignore[arg-type]


class measured_peak:  # noqa: N801  # a context, as those of contextlib
    """Within this context, seconds and peak bytes are counted, and put into a record at its end."""

    def __init__(self, device: str, record: dict[str, Any], name: str) -> None:
        self._device, self._record, self._name = device, record, name

    def __enter__(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()
            self._record[f"{self._name}_peak_bytes"] = torch.cuda.max_memory_allocated()
        self._record[f"{self._name}_s"] = time.perf_counter() - self._started


def finetuning(subject: Subject, machine: Accelerator) -> dict[str, Any]:
    """A step of the default finetuning of few layers: seconds, peak memory, and the estimates."""
    shape = replace(subject.shape, layers=TUNED_LAYERS)
    how = FinetuneConfig(
        train="experts", steps=6, batch_size=8, micro_batch_size=4, lr=1e-6, kl_weight=1.0
    )
    seq_len = min(512, shape.context)
    layout = random_layout(shape, subject.experts, subject.active, seed=0)
    steps, peak = list[float](), dict[str, int]()

    def on_step(step: int, metrics: dict[str, float]) -> None:
        steps.append(metrics["seconds"])
        if subject.device != "cpu":
            peak["peak_bytes"] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()

    with TemporaryDirectory() as scratch:
        source, tuned = written(shape, subject, Path(scratch) / "dense"), Path(scratch) / "tuned"
        tuned.mkdir()
        blocks = TokenBlocks(random_tokens(shape, 64, seq_len, 1))
        finetune(
            describe_dense(source),
            layout,
            blocks,
            how,
            folder=tuned,
            seed=0,
            load=load_of(subject),
            on_step=on_step,
        )
    sizes = sizes_of(shape, TUNED_LAYERS)
    step = step_of(sizes, "experts", at_once=4, seq_len=seq_len, distils=True)
    step = held_as(step, machine)
    return {
        "layers": TUNED_LAYERS,
        "tokens": how.batch_size * seq_len,
        "steps_s": steps,
        "step_s": min(steps),
        **peak,
        "estimated": {
            "machine": machine.name,
            "step_s": sum(seconds(step, machine).values()),
            "peak_bytes": planned(step),
        },
    }


@torch.inference_mode()
def exported_layer(subject: Subject) -> dict[str, Any]:
    """Seconds of one FFN in stock Transformers by tokens at once: dense, and as exports have it."""
    shape, dtype = replace(subject.shape, layers=1, vocabulary=2_048), getattr(torch, subject.dtype)
    dense = random_dense(shape, dtype=dtype, device=subject.device, seed=0)
    expert_size = subject.split.expert_size
    quarter = resolve(ExpertsConfig(expert_size=expert_size, active=0.25), shape.ffn_width)
    default = ExpertsConfig(
        expert_size=expert_size, active=DEFAULT_ACTIVE, shared=DEFAULT_ACTIVE / 2
    )
    models = {
        "dense": dense.model,
        "mixtral, a quarter": random_moe(dense, quarter, "mixtral"),
        "glm4_moe, three quarters": random_moe(
            dense, resolve(default, shape.ffn_width), "glm4_moe"
        ),
    }
    found: dict[str, Any] = {}
    for name, model in models.items():
        ffn: Any = next(
            module for path, module in model.named_modules() if path.endswith("layers.0.mlp")
        )
        experts = getattr(model.config, "_experts_implementation", None)
        found[name] = {"experts": experts, "seconds": {}}
        for batch in BATCHES:
            x_BTD = torch.randn(batch, 1, shape.width, device=subject.device).to(dtype)
            timer = Timer("ffn(x)", globals={"ffn": ffn, "x": x_BTD})
            found[name]["seconds"][batch] = timer.blocked_autorange(min_run_time=0.2).median
    return found


def started_simulation() -> "subprocess.Popen[str]":
    """A process that simulates the memory of these steps on the CPU, beside the measurements."""
    line = [sys.executable, "-c", "import gpu_shapes; gpu_shapes.print_simulated()"]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    here = Path(__file__).parent
    return subprocess.Popen(line, cwd=here, env=hidden, stdout=subprocess.PIPE, text=True)


def print_simulated() -> None:
    """Print the simulated peaks of the steps of this part, as JSON values."""
    shape = WHOLE.shape
    aligned = step_of(sizes_of(shape, shape.layers), "assignment", at_once=WHOLE.micro_batch)
    tuned = step_of(sizes_of(shape, TUNED_LAYERS), "experts", at_once=4, seq_len=512, distils=True)
    repaired = step_of(sizes_of(replace(shape, vocabulary=8_192), 1), "repair")
    rows = {
        "alignment": compared("Qwen2.5-7B", aligned)["simulated"],
        "finetuning": simulated(tuned),
        "repair": simulated(repaired),
    }
    print(json.dumps(rows))


def ended(simulation: "subprocess.Popen[str]") -> dict[str, Any]:
    """Simulated peaks in bytes, from the process of `started_simulation`."""
    output, _ = simulation.communicate()
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
