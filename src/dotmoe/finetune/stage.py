"""STAGE finetune: train the experts, and write what came out as a dense checkpoint and a layout."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from dotmoe.artifacts import DenseModel
from dotmoe.data import TokenBlocks
from dotmoe.distributed import on_every_rank
from dotmoe.errors import UserError
from dotmoe.finetune.config import FinetuneConfig, steps_to_take
from dotmoe.finetune.sharded import sharded_student
from dotmoe.finetune.student import Student
from dotmoe.finetune.task import Finetuning
from dotmoe.finetune.written import write_student
from dotmoe.layout import ExpertLayout
from dotmoe.moe.surgery import recomputing
from dotmoe.training.config import DEFAULT_TRAINING, TrainingConfig
from dotmoe.training.loop import Metrics, Schedule, train


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What training starts from."""

    dense: DenseModel
    """The dense model; it becomes the student and is used up. Loaded whole on each rank; or, where
    weights are to be divided, without weights in the dtype to compute in (see `unloaded`): then
    each rank reads its rows of them from the files, and none ever holds a whole copy."""
    layout: ExpertLayout
    """Experts, routers and k."""
    teacher: DenseModel | None = None
    """A frozen dense model to distil from; see `wants_own_teacher`."""


def finetune(
    start: Start,
    blocks: TokenBlocks,
    config: FinetuneConfig,
    *,
    folder: Path,
    seed: int,
    router_dtype: torch.dtype,
    sharded_over: DeviceMesh | None = None,
    training: TrainingConfig = DEFAULT_TRAINING,
    on_step: Callable[[int, Metrics], None] = lambda step, metrics: None,
) -> None:
    """Train the MoE that the layout makes of a dense model; all ranks together.

    Since the experts partition the neurons, the result is a dense checkpoint with other weights,
    in the original order of the neurons and in the dtype of its source, and a layout.

    Args:
        start: Model, experts, and teacher if there is one.
        blocks: Training text.
        config: See `FinetuneConfig`.
        folder: Receives `model/`, `layout.safetensors`, `metrics.jsonl` and `checkpoints/`, from
            which a run goes on.
        seed: Of the data order, and of adapters.
        router_dtype: Dtype in which router entries must be exact, that of the export.
        sharded_over: Ranks to divide the weights over; None: every rank keeps them all.
        training: How often to save, what to do with bad values, and where to log.
        on_step: Called after each step with its number and metrics.

    Raises:
        UserError: See `train`; or the model was loaded in float16.
    """
    if next(start.dense.model.parameters()).dtype == torch.float16:
        raise UserError(
            "dtype is float16, in which gradients underflow. "
            "Train with --dtype bfloat16 or float32."
        )
    steps = steps_to_take(config, blocks.num_blocks)
    schedule = Schedule(
        steps=steps,
        warmup_steps=round(config.warmup_ratio * steps),
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
    )
    student = on_every_rank(lambda: _student(start, config, sharded_over, seed))
    task = Finetuning(student, start.teacher, blocks, config, seed=seed)
    with recomputing(start.dense, config.activation_checkpointing):
        train(task, schedule, folder, training, on_step)
    write_student(student, start.layout, folder, router_dtype=router_dtype)


def _student(start: Start, config: FinetuneConfig, mesh: DeviceMesh | None, seed: int) -> Student:
    if mesh is None:
        return Student(start.dense, start.layout, config, seed=seed)
    return sharded_student(start.dense, start.layout, config, mesh, seed=seed)
