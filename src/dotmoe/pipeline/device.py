"""A training whose step fits the memory of its device."""

from dataclasses import replace
from typing import Any, TypeVar

import torch

from dotmoe.common.device import memory_of, resolved_device
from dotmoe.common.distributed import broadcast_from_rank_zero, num_ranks
from dotmoe.common.tables import in_bytes
from dotmoe.measure.inspection.planner import fit_to_memory
from dotmoe.measure.inspection.sizes import Sizes, Step
from dotmoe.method.config import AlignConfig, FinetuneConfig
from dotmoe.method.granularity import Splits
from dotmoe.models.dense_model import DenseModel
from dotmoe.pipeline.stages import Run

Training = TypeVar("Training", AlignConfig, FinetuneConfig)


def fitting_the_device(
    run: Run,
    dense: DenseModel,
    splits: Splits,
    how: Training,
    *,
    dtype: torch.dtype,
    sharded: bool,
) -> Training:
    """The options of a training, the same on all ranks, with what makes its step fit the device.

    `dtype` is what it computes in; `sharded` says whether ranks shard the weights.
    """

    def changes() -> dict[str, Any]:
        step = _step_of(run, dense, splits, how, dtype=dtype, sharded=sharded)
        chosen = fit_to_memory(step, step.memory_bytes)
        if chosen != step:
            run.progress.log(f"a step would not fit into memory, by estimate: {_said_of(chosen)}")
        changed: dict[str, Any] = {
            "micro_batch_size": min(how.micro_batch_size, chosen.micro_batch_size),
            "activation_checkpointing": chosen.checkpointing,
        }
        if chosen.offload:
            changed["offload"] = True
        return changed

    return replace(how, **broadcast_from_rank_zero(changes))


def _step_of(
    run: Run,
    dense: DenseModel,
    splits: Splits,
    how: Training,
    *,
    dtype: torch.dtype,
    sharded: bool,
) -> Step:
    """One step of a training as its options have it."""
    device = resolved_device(run.config.load.device)
    train = "assignment"
    offload = False
    if isinstance(how, FinetuneConfig):
        train = how.train
        offload = how.offload
    return Step(
        sizes=Sizes(dense.model, splits, stored=dtype, written=dtype),
        batch_size=how.batch_size,
        seq_len=run.text.training.seq_len,
        micro_batch_size=min(how.micro_batch_size, how.batch_size // num_ranks()),
        weight_bytes=4 if dtype.itemsize == 4 else 2,
        train=train,  # type: ignore[arg-type]
        distils=how.kl_weight > 0,  # as an alignment always does
        on_cpu=device.type == "cpu",
        checkpointing=how.activation_checkpointing,
        ranks=num_ranks(),
        sharded=sharded or offload,
        offload=offload,
        memory_bytes=memory_of(device),
    )


def _said_of(chosen: Step) -> str:
    """What is changed in the options of a training, in words."""
    changed = f"activation_checkpointing is on, micro_batch_size {chosen.micro_batch_size}"
    if not chosen.offload:
        return changed
    return f"{changed}, offload to {in_bytes(chosen.on_host)} of the host's memory for each rank"
