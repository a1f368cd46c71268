"""Trouble on one of two ranks, forked from this process: both decide alike."""

import multiprocessing
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from toy_tasks import Regression

from dotmoe.distributed import divided, mesh, rank
from dotmoe.errors import Interrupted, UserError
from dotmoe.training.folder import Checkpoints
from dotmoe.training.loop import TrainingConfig, train


class Troubled(Regression):
    """A tower of 3 layers over two ranks, whose second is signalled in step 6."""

    spoilt_in = None
    """Step in which the last layer's gradient is not finite."""

    def __init__(self):
        super().__init__()
        self.tower = nn.Parameter(divided(torch.ones(3, 4), mesh(torch.device("cpu"))))

    def parameter_groups(self):
        return [{"params": [("tower", self.tower)], "lr": 0.1}]

    def accumulate_gradients(self, step):
        metrics = super().accumulate_gradients(step)
        self.tower.grad = torch.ones_like(self.tower)
        if rank() == 1 and step == self.spoilt_in:
            self.tower.grad.to_local().fill_(torch.nan)
        if rank() == 1 and step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return metrics


class Spoilt(Troubled):
    spoilt_in = 5


def in_trouble(folder, number, results):
    """What the troubles end in: an error, a signal."""
    store = dist.FileStore(str(folder / "meeting"), 2)
    dist.init_process_group("gloo", store=store, rank=number, world_size=2)
    for kind in (Spoilt, Troubled):
        try:
            train(kind(), folder, TrainingConfig(checkpoint_every=4))
        except (UserError, Interrupted) as error:
            results.put((kind.__name__, str(error)))
    dist.destroy_process_group()


def test_ranks_decide_alike(tmp_path):
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    ranks = [fork.Process(target=in_trouble, args=(tmp_path, n, results)) for n in (0, 1)]
    for process in ranks:
        process.start()
    said = [results.get(timeout=120) for _ in range(4)]
    for name, words in (
        ("Spoilt", "grad_norm is nan at step 6. The last good one is"),
        ("Troubled", "SIGTERM stopped it after step 7"),
    ):
        assert [words in text for kind, text in said if kind == name] == [True, True]
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    assert Checkpoints(tmp_path).newest().name == "step_00000007"
