"""Signals in the middle of a step. Oracle: a run that nobody stopped."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from toy_tasks import metrics_in, trained

from dotmoe.cli import run
from dotmoe.common.errors import Interrupted
from dotmoe.common.interrupts import interrupts_kept
from dotmoe.training.folder import Checkpoints

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def interruptible():
    """Where the tests were started in the background or by nohup, signals are ignored."""
    usual = (signal.default_int_handler, signal.SIG_DFL, signal.SIG_DFL)
    before = [signal.signal(number, handler) for number, handler in zip(STOPS, usual, strict=True)]
    yield
    for number, handler in zip(STOPS, before, strict=True):
        signal.signal(number, handler)


def stopped_by(*signals):
    """What happens in a step: these signals come."""

    def event(task, metrics):
        for signum in signals:
            os.kill(os.getpid(), signum)

    return event


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_step_and_the_run_goes_on_bit_identical(signum, tmp_path):
    handler = signal.getsignal(signum)
    said = f"^{signum.name} stopped the run after step 7, now saved$"
    with pytest.raises(Interrupted, match=said) as stopped:
        trained(tmp_path, {6: stopped_by(signum)})
    assert stopped.value.signum == signum
    assert signal.getsignal(signum) == handler
    assert [line["step"] for line in metrics_in(tmp_path)] == list(range(1, 8))
    assert Checkpoints(tmp_path).newest().name == "step_00000007"
    resumed = trained(tmp_path, {6: stopped_by(signum)})  # a step that is not taken again
    assert torch.equal(resumed.weight, trained(tmp_path / "whole").weight)


def test_a_handler_that_is_not_pythons_is_left_alone(tmp_path, monkeypatch, capsys):
    """Python does not tell it, as where a library in C has set one."""
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    assert trained(tmp_path) is not None
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("dotmoe")


def test_a_second_sigint_interrupts_at_once(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, {2: stopped_by(signal.SIGINT, signal.SIGINT)})
    assert [line["step"] for line in metrics_in(tmp_path)] == [1, 2]
    assert Checkpoints(tmp_path).newest() is None


def test_sigterm_before_a_training_says_how_to_go_on(monkeypatch, capsys):
    monkeypatch.setattr(
        "dotmoe.cli.entry._dispatch", lambda *_: os.kill(os.getpid(), signal.SIGTERM)
    )
    assert run([]) == 143
    assert "SIGTERM stopped it. What is finished is kept; the same" in capsys.readouterr().err


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_command_line_says_how_to_go_on(signum, status, monkeypatch, capsys):
    def stopped(*arguments):
        raise Interrupted(signum, "stopped after step 3")

    monkeypatch.setattr("dotmoe.cli.entry._dispatch", stopped)
    assert run([]) == status
    assert capsys.readouterr().err == (
        "dotmoe: error: stopped after step 3; the same command goes on from there.\n"
    )


def test_handlers_are_those_of_before_after_a_command():
    before = {number: signal.getsignal(number) for number in STOPS}
    with interrupts_kept():
        assert all(signal.getsignal(number) != before[number] for number in STOPS)
    assert {number: signal.getsignal(number) for number in STOPS} == before


SWALLOWED = {
    "a destructor": """
class Dying:
    def __del__(self):
        os.kill(os.getpid(), signal.{signal})
        time.sleep(0.01)
Dying()
time.sleep(30)
""",
    "a library that catches all": """
try:
    os.kill(os.getpid(), signal.{signal})
    time.sleep(1)
except BaseException:
    pass
""",
    "before a progress bar": """
try:
    os.kill(os.getpid(), signal.{signal})
    time.sleep(1)
except BaseException:
    pass
Progress().log("goes on")
""",
}


@pytest.mark.parametrize("by", SWALLOWED)
@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_whose_exception_is_swallowed_ends_the_command_all_the_same(by, name, status):
    body = textwrap.indent(SWALLOWED[by].format(signal=name), "    ")
    code = (
        "import os, signal, sys, time\n"
        "from dotmoe.cli import entry\n"
        "from dotmoe.common.progress import Progress\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"def dispatch(*_):{body}\n"
        "entry._dispatch = dispatch\n"
        "sys.exit(entry.run(['report']))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == status
    assert "the same command goes on from there" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "\ngoes on" not in ended.stderr
