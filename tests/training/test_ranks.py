"""Trouble on one of two ranks, forked from this process: both decide alike, and resume alike."""

import os
import resource
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from toy_tasks import Regression, trained

from dotmoe.cli.entry import message_of
from dotmoe.common.distributed import mesh, rank
from dotmoe.common.errors import Interrupted, UserError
from dotmoe.common.sharded import divided
from dotmoe.training.config import TrainingConfig
from dotmoe.training.folder import Checkpoints
from dotmoe.training.loop import train
from runs import on_ranks


class Troubled(Regression):
    """3 layers over two ranks; things happen on the second, which has the last."""

    def __init__(self, events=None):
        super().__init__(events if rank() == 1 else None)
        self.tower = nn.Parameter(divided(torch.ones(3, 50_000), mesh(torch.device("cpu"))))

    def parameter_groups(self):
        return [{"params": [("tower", self.tower)], "lr": 0.1}]

    def accumulate_gradients(self, step):
        self.tower.grad = (step + 1) * torch.ones_like(self.tower)
        return super().accumulate_gradients(step)


def spoil(task, metrics):
    task.tower.grad.to_local().fill_(torch.nan)


def terminate(task, metrics):
    os.kill(os.getpid(), signal.SIGTERM)


def limit_files(task, metrics, size=100_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def in_trouble(folder):
    """An error, a signal, a full disk, and nothing: each run goes on from the one before."""
    dist.init_process_group("gloo")
    with pytest.raises(
        UserError, match=r"at step 4\. The last good checkpoint is .*step_00000002\."
    ):
        train(Troubled({3: spoil}), folder, TrainingConfig(checkpoint_every=2))
    with pytest.raises(Interrupted, match="SIGTERM stopped the run after step 7"):
        train(Troubled({6: terminate}), folder)
    with pytest.raises(OSError, match="was truncated") as full:
        trained(folder, task=Troubled({8: limit_files}))
    assert message_of(full.value).startswith("the disk is full")
    assert rank() or os.listdir(folder / "checkpoints") == ["step_00000007"]
    limit_files(None, None, resource.RLIM_INFINITY)
    task, whole = (trained(place, task=Troubled()) for place in (folder, folder / "whole"))
    assert torch.equal(task.tower.to_local(), whole.tower.to_local())
    dist.destroy_process_group()


def test_ranks_decide_alike(tmp_path):
    on_ranks(2, in_trouble, tmp_path)
    assert Checkpoints(tmp_path).newest().name == "step_00000012"
