"""Signals to real processes. Oracle: a run that nobody stopped."""

import json
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import replace

import pytest
import torch
import toy_tasks

from dotmoe.cli import run
from dotmoe.errors import Interrupted
from dotmoe.training.folder import Checkpoints
from dotmoe.training.loop import TrainingConfig, train


class Slow(toy_tasks.Regression):
    """Says which step it is in; step 2 takes so many seconds, all others a tenth of one."""

    schedule = replace(toy_tasks.SCHEDULE, steps=1000)

    def __init__(self, tell, seconds):
        super().__init__()
        self.tell, self.seconds = tell, seconds

    def accumulate_gradients(self, step):
        self.tell.send(step)
        time.sleep(self.seconds if step == 2 else 0.1)
        return super().accumulate_gradients(step)


def train_slowly(folder, tell, seconds):
    """100 seconds, if it is let."""
    # Where the tests were started in the background, SIGINT is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        train(Slow(tell, seconds), folder, TrainingConfig(checkpoint_every=10_000))
    except Interrupted as stop:
        tell.send(str(stop))
        sys.exit(128 + stop.signum)
    except KeyboardInterrupt:
        sys.exit(1)


@pytest.fixture
def slow(tmp_path, request):
    """A forked process that trains, and the end of a pipe that tells its steps."""
    fork = multiprocessing.get_context("fork")
    told, tell = fork.Pipe(duplex=False)
    process = fork.Process(
        target=train_slowly, args=(tmp_path, tell, getattr(request, "param", 0.1))
    )
    process.start()
    yield process, told
    process.kill()
    process.join()


def wait_for_step(told, step):
    while told.poll(60):
        if told.recv() == step:
            return
    pytest.fail(f"no step {step} within a minute")


def steps_in(folder):
    return [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_step_saves_it_and_stops(signum, slow, tmp_path):
    process, told = slow
    wait_for_step(told, 2)
    os.kill(process.pid, signum)
    process.join(60)
    assert process.exitcode == 128 + signum
    steps = steps_in(tmp_path)
    assert steps == list(range(1, len(steps) + 1))
    while told.poll():
        last = told.recv()
    assert last == f"{signum.name} stopped it after step {len(steps)}, now saved"
    assert Checkpoints(tmp_path).newest().name == f"step_{len(steps):08d}"


@pytest.mark.parametrize("slow", [60.0], indirect=True)
def test_a_second_sigint_interrupts_at_once(slow, tmp_path):
    process, told = slow
    wait_for_step(told, 2)
    while process.is_alive():  # signals of one number that wait together are one
        os.kill(process.pid, signal.SIGINT)
        process.join(0.5)
    assert process.exitcode == 1
    assert steps_in(tmp_path) == [1, 2]
    assert Checkpoints(tmp_path).newest() is None


def stop(task, metrics):
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_stopped_run_goes_on_bit_identical(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="SIGTERM stopped it after step 7"):
        train(toy_tasks.Regression({6: stop}), tmp_path)
    assert signal.getsignal(signal.SIGTERM) == before
    resumed, whole = toy_tasks.Regression({6: stop}), toy_tasks.Regression()
    train(resumed, tmp_path)
    (tmp_path / "whole").mkdir()
    train(whole, tmp_path / "whole")
    assert torch.equal(resumed.weight, whole.weight)


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_command_line_says_how_to_go_on(signum, status, monkeypatch, capsys):
    def stopped(*arguments):
        raise Interrupted(signum, "stopped after step 3")

    monkeypatch.setattr("dotmoe.cli._dispatch", stopped)
    assert run([]) == status
    assert capsys.readouterr().err == (
        "dotmoe: error: stopped after step 3; the same command goes on from there.\n"
    )
