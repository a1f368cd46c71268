"""Which learning rate a finetuning takes: KL on fresh batches, at several rates side by side.

    python experiments/finetune_rate.py RUN OUT.json --text FINETUNED/0_data/training.safetensors

Starts from RUN, a finished conversion, once for each rate, and reads the same batches of TEXT in
the same order. A batch is measured before it is learned from, so that each number is of text that
the model has not seen. Rate 0 is RUN as it is: the ratio to it says whether a training helps.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from dotmoe.cli.arguments import settings as settings_of
from dotmoe.common.distributed import fsdp_mesh
from dotmoe.common.files import write_json
from dotmoe.common.options import ARGUMENT, at_least
from dotmoe.method.config import FinetuneConfig
from dotmoe.method.finetuning import Finetuning, Student
from dotmoe.models.config import LoadConfig
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.load import load_dense
from dotmoe.models.meta_model import meta_model
from dotmoe.run.config import finetune_recipe
from dotmoe.run.finished import FinishedRun
from dotmoe.run.provenance import provenance
from dotmoe.text.blocks import TokenBlocks
from dotmoe.training.loop import adamw, cosine_with_warmup, global_norm, update


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One conversion, the text, and the rates."""

    run: Annotated[Path, ARGUMENT]
    """Run folder of a finished conversion."""
    out: Annotated[Path, ARGUMENT]
    """File to write."""
    text: Path
    """Tokens to learn from: 0_data/training.safetensors of a finetuning."""
    rates: tuple[float, ...] = (0.0, 0.25, 1.0, 4.0)
    """Multiples of the default rate."""
    steps: Annotated[int, at_least(1)] = 16
    """Steps that are made at each rate."""
    of_steps: Annotated[int, at_least(1)] = 48
    """Steps of the schedule, of which those are the first."""
    batch_size: Annotated[int, at_least(1)] = 4
    """Sequences of a step."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"


def main() -> None:
    settings = settings_of(Settings, __doc__)
    found = FinishedRun(settings.run)
    load = LoadConfig(dtype=settings.dtype)
    teacher = load_dense(found.origin().source, load)
    recipe = finetune_recipe(run=str(settings.run), out=str(settings.out)).finetune
    config = replace(
        recipe,
        steps=settings.of_steps,
        batch_size=settings.batch_size,
        micro_batch_size=settings.batch_size,
    )
    blocks = TokenBlocks.load(settings.text)
    rows = []
    for multiple in settings.rates:
        with fsdp_mesh(torch.device("cpu"), shard=False) as ranks:
            task, default = started(found, teacher, blocks, config, multiple, ranks)
            kls = list(islice(kl_of_steps(task, is_trained=multiple > 0), settings.steps))
        rows.append({"multiple": multiple, "rate": multiple * default, "kl": kls})
    record = {
        "origin": "measured",
        "rows": rows,
        "finetune": asdict(config),
        "provenance": provenance(seed=0),
    }
    write_json(settings.out, record)


def started(
    found: FinishedRun,
    teacher: DenseModel,
    blocks: TokenBlocks,
    config: FinetuneConfig,
    multiple: float,
    ranks: DeviceMesh,
) -> tuple[Finetuning, float]:
    """A training that starts from a run, at a multiple of the default rate; and that default."""
    dtype = next(teacher.model.parameters()).dtype
    described = found.described()
    described = replace(described, model=meta_model(described.config, dtype), weights="meta")
    student = Student(described, found.layouts[0], config, ranks, seed=0)
    task = Finetuning(student, teacher, blocks, config, seed=0)
    default = task.parameter_groups()[-1]["lr"]
    if multiple:
        task.config = replace(config, lr=multiple * default)
    return task, default


def kl_of_steps(task: Finetuning, *, is_trained: bool) -> Iterator[float]:
    """KL(dense || MoE) of each step's batch, before it is learned from if `is_trained`."""
    optimizer = adamw(task)
    schedule = task.schedule
    for step in range(schedule.steps):
        metrics: dict[str, Any] = dict(task.accumulate_gradients(step))
        factor = cosine_with_warmup(
            step, total_steps=schedule.steps, warmup_steps=schedule.warmup_steps
        )
        if is_trained:
            update(optimizer, schedule.max_grad_norm, global_norm(optimizer), factor)
        optimizer.zero_grad()
        print(f"step {step + 1}: KL {metrics['kl']:.3f}", flush=True)
        yield float(metrics["kl"])


if __name__ == "__main__":
    main()
