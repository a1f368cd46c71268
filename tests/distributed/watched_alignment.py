"""An alignment whose assignments and gradients are written down."""

from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

from dotmoe.common.distributed import (
    broadcast_from_rank_zero,
    process_group,
    raise_on_all_ranks,
    rank,
)
from dotmoe.common.errors import UserError
from dotmoe.common.sharded import full_tensor, local_part
from dotmoe.method.align import Alignment
from dotmoe.method.calibrate import calibrate
from dotmoe.method.config import AlignConfig, AssignmentConfig, CalibrateConfig
from dotmoe.method.granularity import Granularity
from dotmoe.method.masked import masked
from dotmoe.models.checkpoint import Tensors
from dotmoe.models.hooks import recomputing
from dotmoe.training.config import TrainingConfig
from dotmoe.training.loop import train
from runs import loaded, random_blocks

E, K, STEPS = 12, 3, 4
CONFIG = AlignConfig(
    steps=STEPS, batch_size=8, micro_batch_size=2, lr=1e-2, warmup_ratio=0.3, max_epochs=10
)
ASSIGNMENT = AssignmentConfig(tau_start=0.5, tau_end=0.1)


class Watched(Alignment):
    """Remembers the assignment of every step."""

    def begin(self, step):
        result = super().begin(step)
        self.seen = [*getattr(self, "seen", []), self.parts[0].masking.expert_of_neuron_LN.clone()]
        return result


class StoppedError(Exception):
    """Instead of a kill."""


def split_of(dense):
    return Granularity(num_experts=E, expert_size=dense.widths.ffn // E, active_experts=K)


def new_task(dense, start):
    splits = (split_of(dense),)
    return Watched(dense, random_blocks(20), (start,), splits, CONFIG, ASSIGNMENT, seed=0)


def learned_by(task):
    return task.parts[0].affinity_LNE, task.parts[0].router_LED


def watched_run(model, folder, *, sharding="auto", recompute=False, stop_after=None):
    """Calibration, the gradients of a first step, and a short alignment (resumed if begun)."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    dense = loaded(model, sharding=sharding)
    config, blocks = CalibrateConfig(calibration_tokens=240), random_blocks(20)
    start = calibrate(dense, blocks, split_of(dense), config, ASSIGNMENT, seed=0)
    first = new_task(dense, start)
    with masked(dense, first.maskings), recomputing(dense, recompute):
        first.accumulate_gradients(0)
    task, metrics = new_task(dense, start), {}

    def on_step(step, values):
        metrics[step] = values
        if step == stop_after:
            raise StoppedError

    with suppress(StoppedError), masked(dense, task.maskings), recomputing(dense, recompute):
        train(task, Path(folder), TrainingConfig(checkpoint_every=2), on_step)
    return {
        "start": (start.affinity_LNE, start.router_LED),
        "gradients": tuple(full_tensor(p.grad) for p in learned_by(first)),
        "assignments": torch.stack(task.seen),
        "metrics": metrics,
        "end": tuple(full_tensor(p.detach()) for p in learned_by(task)),
        "own_layers": len(local_part(task.parts[0].affinity_LNE)),
    }


def read_sizes(model):
    """Bytes of each read while a model is loaded into shards, and what then is held."""
    sizes, read_rows = [], Tensors.read_rows

    def counted(*arguments):
        part = read_rows(*arguments)
        sizes.append(part.nbytes)
        return part

    with patch.object(Tensors, "read_rows", counted):
        dense = loaded(model, sharding="shard")
    held = {id(p): local_part(p).nbytes for p in dense.model.parameters()}
    return {"reads": sizes, "held": sum(held.values())}


def shared_failures():
    """This rank's number, and the messages that it gets where one rank alone fails."""

    def fail_on(number):
        if rank() == number:
            raise UserError(f"no file on {number}")
        return rank()

    results = [raise_on_all_ranks(rank)]
    for together, number in ((raise_on_all_ranks, 1), (broadcast_from_rank_zero, 0)):
        try:
            together(partial(fail_on, number))
        except UserError as error:
            results.append(str(error))
    return results


def do(jobs, out):
    """Do each job, by its name a function and its options; rank r then finds it in `NAME.r.pt`."""
    with process_group(torch.device("cpu")):
        for name, (work, options) in jobs.items():
            torch.save(work(**options), out / f"{name}.{rank()}.pt")
