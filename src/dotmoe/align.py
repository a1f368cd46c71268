"""STAGE align: learn affinities and routers under frozen dense weights."""

from collections.abc import Callable
from pathlib import Path

import torch

from dotmoe.artifacts import AlignState, DenseModel
from dotmoe.data import TokenBlocks
from dotmoe.distributed import on_every_rank, require_equal_shares, whole
from dotmoe.errors import UserError
from dotmoe.moe.alignment import AlignConfig, Alignment
from dotmoe.moe.assignment import AssignmentConfig
from dotmoe.moe.surgery import masked, recomputing
from dotmoe.training.config import DEFAULT_TRAINING, TrainingConfig
from dotmoe.training.loop import Metrics, Schedule, train

__all__ = ["AlignConfig", "Alignment", "align", "steps_to_take"]


def steps_to_take(config: AlignConfig, num_blocks: int) -> int:
    """`config.steps`, or fewer where the data would be seen more than `max_epochs` times."""
    if config.steps == 0:
        return 0
    return min(config.steps, max(1, int(config.max_epochs * num_blocks / config.batch_size)))


def align(  # noqa: PLR0913 (the stage's own five and the run's six)
    dense: DenseModel,
    blocks: TokenBlocks,
    initial: AlignState,
    active_experts: int,
    config: AlignConfig,
    assignment: AssignmentConfig,
    *,
    folder: Path,
    seed: int,
    first_dense_layers: int = 0,
    training: TrainingConfig = DEFAULT_TRAINING,
    on_step: Callable[[int, Metrics], None] = lambda step, metrics: None,
) -> AlignState:
    """Train A and W_r so that the masked model follows the dense one (eq:total_loss).

    Under torchrun each rank takes an equal part of every batch and solves the assignment of some
    layers; all ranks call this together, and return the same state.

    Args:
        dense: The frozen model; teacher and student share its weights.
        blocks: Training text.
        initial: Where to start; left untouched.
        active_experts: k.
        config: See `AlignConfig`.
        assignment: Solver and temperatures.
        folder: Receives `metrics.jsonl` and `checkpoints/`; the newest there is resumed from.
        seed: Of the data order.
        first_dense_layers: Leading layers that stay dense; their part of the state is not trained.
        training: How often to save, what to do with bad values, and where to log.
        on_step: Called after each step with its number and metrics.

    Returns:
        The trained state.
    """
    steps = steps_to_take(config, blocks.num_blocks)
    if steps == 0:
        return initial
    on_every_rank(lambda: _require_trainable(dense, config))
    schedule = Schedule(
        steps=steps,
        warmup_steps=round(config.warmup_ratio * steps),
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
    )
    task = Alignment(
        dense,
        blocks,
        initial,
        active_experts,
        config,
        assignment,
        warmup_steps=schedule.warmup_steps,
        seed=seed,
        first_dense_layers=first_dense_layers,
    )
    with masked(dense, task.masking), recomputing(dense, config.activation_checkpointing):
        train(task, schedule, folder, training, on_step)
    learned = (whole(task.affinity_LNE.detach()), whole(task.router_LED.detach()))
    return AlignState(affinity_LNE=learned[0], router_LED=learned[1], step=steps)


def _require_trainable(dense: DenseModel, config: AlignConfig) -> None:
    require_equal_shares(config.batch_size)
    if next(dense.model.parameters()).dtype == torch.float16:
        raise UserError(
            "dtype is float16, in which the gradients of the masks underflow. "
            "Align with --dtype bfloat16 or float32."
        )
