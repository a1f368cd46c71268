"""Training on several ranks. Oracle: the same training on one."""

import multiprocessing
import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from toy_tasks import SCHEDULE, Stack

from dotmoe.distributed import full_tensor, mesh, rank
from dotmoe.errors import Interrupted, UserError
from dotmoe.training.loop import TrainingConfig, checkpoints_in, global_norm, train

EVERY_4 = TrainingConfig(checkpoint_every=4, keep_checkpoints=9)


def run_ranks(count, work, *arguments):
    """Results of `work(*arguments)` on each of `count` forked ranks."""
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    meeting = arguments[0] / f"meeting_{count}_{work.__name__}"

    def be_rank(number):
        store = dist.FileStore(str(meeting), count)
        dist.init_process_group("gloo", store=store, rank=number, world_size=count)
        torch.manual_seed(number)
        results.put((number, work(*arguments)))
        dist.destroy_process_group()

    ranks = [fork.Process(target=be_rank, args=(number,)) for number in range(count)]
    for process in ranks:
        process.start()
    found = dict(results.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0] * count
    meeting.unlink(missing_ok=True)
    return [found[number] for number in range(count)]


def outcome(task, losses):
    tower, row = (full_tensor(p.detach()).numpy() for p in (task.tower, task.row))
    return losses, tower, row, task.offset.numpy()


def trained(folder, task=None):
    """Losses and final parameters; where there are several ranks, the tower is sharded."""
    task = task or Stack(mesh=mesh(torch.device("cpu")))
    losses = []
    train(task, SCHEDULE, folder, EVERY_4, lambda step, metrics: losses.append(metrics["loss"]))
    return outcome(task, losses)


def agree(one, other):
    for a, b in zip(one, other, strict=True):
        assert torch.allclose(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("alone"))


def only_checkpoint(folder, step):
    """Leave the checkpoint of one step, as a kill after it would."""
    for checkpoint in (folder / "checkpoints").iterdir():
        if checkpoint.name != f"step_{step:08d}":
            for file in checkpoint.iterdir():
                file.unlink()
            checkpoint.rmdir()


def test_two_ranks_train_as_one_and_their_checkpoint_resumes_on_any_number(alone, tmp_path):
    first, second = run_ranks(2, trained, tmp_path)
    agree(first, alone)
    assert first[0] == second[0]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == SCHEDULE.steps

    only_checkpoint(tmp_path, 4)
    losses, *rest = trained(tmp_path)
    agree((losses, *rest), (alone[0][4:], *alone[1:]))

    only_checkpoint(tmp_path, 8)  # that one was written by one rank; three layers on four ranks
    for losses, *rest in run_ranks(4, trained, tmp_path):
        agree((losses, *rest), (alone[0][8:], *alone[1:]))


def clipped(folder):
    """Norm and clipped gradients of sharded parameters, gathered."""
    task = Stack(mesh=mesh(torch.device("cpu")))
    task.accumulate_gradients(0)
    parameters = [task.tower, task.row]
    norm = global_norm(parameters)
    nn.utils.clip_grads_with_norm_(parameters, 0.5, norm)
    return float(norm), *(p.grad.full_tensor().numpy() for p in parameters)


def test_the_norm_over_shards_is_the_true_one(tmp_path):
    task = Stack()
    task.accumulate_gradients(0)
    norm = nn.utils.clip_grad_norm_([task.tower, task.row], 0.5)
    for found, tower, row in run_ranks(4, clipped, tmp_path):
        assert found == pytest.approx(norm.item(), rel=1e-6)
        assert torch.allclose(torch.as_tensor(tower), task.tower.grad, rtol=1e-5)
        assert torch.allclose(torch.as_tensor(row), task.row.grad, rtol=1e-5)


class Troubled(Stack):
    """In step 3 the layer of the second rank is spoilt; in step 6 that rank is signalled."""

    def accumulate_gradients(self, step):
        metrics = super().accumulate_gradients(step)
        if step == 3:
            local = self.tower.grad.to_local()
            if rank() == 1:
                local.fill_(torch.nan)
        if step == 6 and rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return metrics


def in_trouble(folder):
    """What each of three troubles ends in."""
    task = Troubled(mesh=mesh(torch.device("cpu")))
    try:
        train(task, SCHEDULE, folder, EVERY_4)
    except UserError as error:
        told = str(error)
    skip = TrainingConfig(on_bad_loss="skip")
    skipped = []
    try:
        train(
            Troubled(mesh=mesh(torch.device("cpu"))), SCHEDULE, folder, skip,
            lambda step, metrics: skipped.append(metrics["skipped"]),
        )  # fmt: skip
    except Interrupted as stop:
        return told, skipped, stop.signum
    return None


def test_ranks_decide_alike(tmp_path):
    for told, skipped, signum in run_ranks(2, in_trouble, tmp_path):
        assert "at step 4; the first gradient that is not finite is that of tower, layer 2" in told
        assert skipped == [0, 0, 0, 1, 1, 1, 1]
        assert signum == signal.SIGTERM
    assert checkpoints_in(tmp_path).newest().name == "step_00000007"
