"""The command line itself: help, version, failures. Oracle: the words."""

import errno
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from dotmoe import cli
from dotmoe.cli import COMMANDS, run


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_common_options_exist(name, command):
    short, full = command(name, "--help"), command(name, "--help-all")
    assert short.status == full.status == 0
    assert COMMANDS[name].help in short.out
    for option in COMMANDS[name].common:
        assert f"  --{option}" in short.out
    if COMMANDS[name].common:
        assert "--help-all" in short.out
        assert len(short.out) < len(full.out) / 2


def test_the_version_comes_without_pytorch():
    code = (
        "import sys; from dotmoe.cli import run; run(['--version']); print('torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["dotmoe", "0.1.0", "False"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["convrt"], "Did you mean convert?"),
        (["convert", "m", "o", "--stpes", "3"], "Did you mean --steps?"),
        (["convert", "m", "o", "--method", "cmo"], "Did you mean cmoe?"),
        (["convert", "m", "o", "--recipe", "smal"], "Did you mean small?"),
        (["finetune", "r", "o", "--lr", "0"], "lr is 0.0, but it must be above 0."),
        (["compare", "m", "o", "--tau-start", "nan"], "tau_start is nan, but it must be"),
        (["export", "x[/y]", "o"], "x[/y] is no run"),
        (["bench", "a", "b", "--rounds", "0"], "0"),
    ],
)
def test_wrong_use_is_one_line(arguments, words, command):
    assert words in command(*arguments).refusal()


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("convert", torch.OutOfMemoryError("GPU"), "--micro-batch-size"),
        ("evaluate", torch.OutOfMemoryError("GPU"), "smaller batch, or --device cpu"),
        ("convert", OSError(errno.ENOSPC, "No space"), "the disk is full"),
        ("convert", PermissionError(errno.EACCES, "no"), "Get permission"),
        ("convert", RuntimeError("I/O error (os error 28)"), "the disk is full"),
        ("convert", KeyError("a defect"), None),
    ],
)
def test_failures_of_the_machine_are_one_line_and_defects_are_not(name, error, words):
    message = cli.message_of(error, name)
    assert message is None if words is None else words in message


def test_sigterm_outside_of_training_ends_with_its_own_status(tmp_path, tiny_dense, text_file):
    arguments = ["convert", tiny_dense("llama"), tmp_path / "run", "--data", text_file]
    process = subprocess.Popen(
        [sys.executable, "-m", "dotmoe", *map(str, arguments), "--expert-size", "8"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    while not (tmp_path / "run").exists():
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "the same command goes on" in said
    assert "Traceback" not in said


def test_text_of_results_is_printed_as_it_is(capsys):
    from dotmoe.cli.commands import _show

    _show("pip install 'dotmoe[analysis]'", "x[/y].txt")
    assert capsys.readouterr().out == "pip install 'dotmoe[analysis]'\nx[/y].txt\n"


def test_nothing_is_a_help_too(capsys):
    assert run([]) == 0
    assert "usage: dotmoe COMMAND" in capsys.readouterr().out
