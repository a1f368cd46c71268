"""A finished run of a tiny model, and options that keep exports of it quick."""

import pytest

from dotmoe.cli import run

QUICK = ["--scale-tokens", "256", "--verify-tokens", "128"]
TEXT = "\n".join(f"Line {i}: the crow ate {i * 7 % 13} figs." for i in range(400))


@pytest.fixture
def quick():
    """Options for few tokens."""
    return QUICK


@pytest.fixture
def finished(tiny_dense, tmp_path):
    """Folder and model of a run of the training-free start alone."""
    (tmp_path / "text.txt").write_text(TEXT)
    options = ["--expert-size", "8", "--steps", "0", "--seq-len", "32", "--eval-tokens", "512"]
    options += ["--calibration-tokens", "512", *QUICK]
    model, out = str(tiny_dense("llama")), str(tmp_path / "run")
    assert run(["convert", model, out, "--data", str(tmp_path / "text.txt"), *options]) == 0
    return tmp_path / "run", model
