"""Trouble on one of two ranks, forked from this process: both decide alike."""

import multiprocessing
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from toy_tasks import Regression

from dotmoe.common.distributed import divided, mesh, rank
from dotmoe.common.errors import Interrupted, UserError
from dotmoe.training.config import TrainingConfig
from dotmoe.training.folder import Checkpoints
from dotmoe.training.loop import train


class Troubled(Regression):
    """3 layers over two ranks; the last may be spoilt in step 3, and its rank is signalled in 6."""

    def __init__(self, *, is_spoilt):
        super().__init__()
        self.is_spoilt = is_spoilt
        self.tower = nn.Parameter(divided(torch.ones(3, 4), mesh(torch.device("cpu"))))

    def parameter_groups(self):
        return [{"params": [("tower", self.tower)], "lr": 0.1, "first_layer": 0}]

    def accumulate_gradients(self, step):
        metrics = super().accumulate_gradients(step)
        self.tower.grad = torch.ones_like(self.tower)
        if self.is_spoilt and rank() == 1 and step == 3:
            self.tower.grad.to_local().fill_(torch.nan)
        if rank() == 1 and step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return metrics


def in_trouble(folder, number, results):
    """What the troubles end in: an error, a signal."""
    store = dist.FileStore(str(folder / "meeting"), 2)
    dist.init_process_group("gloo", store=store, rank=number, world_size=2)
    try:
        train(Troubled(is_spoilt=True), folder, TrainingConfig(checkpoint_every=4))
    except UserError as error:
        told = str(error)
    try:
        train(Troubled(is_spoilt=False), folder)
    except Interrupted as stop:
        results.put((told, stop.signum))
    dist.destroy_process_group()


def test_ranks_decide_alike(tmp_path):
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    ranks = [fork.Process(target=in_trouble, args=(tmp_path, n, results)) for n in (0, 1)]
    for process in ranks:
        process.start()
    for _ in ranks:
        told, signum = results.get(timeout=120)
        assert "at step 4; the first gradient that is not finite is that of tower, layer 2" in told
        assert signum == signal.SIGTERM
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    assert Checkpoints(tmp_path).newest().name == "step_00000007"
