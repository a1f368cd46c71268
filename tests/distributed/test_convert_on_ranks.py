"""`torchrun -m dotmoe convert`. Oracle: the same command on one rank."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from start_ranks import torchrun

from dotmoe.cli import run
from dotmoe.layout import ExpertLayout

OPTIONS = ["--expert-size", "8", "--steps", "6", "--batch-size", "4", "--micro-batch-size", "2",
           "--seq-len", "32", "--lr", "1e-2", "--calibration-tokens", "512", "--eval-tokens", "512",
           "--scale-tokens", "256", "--verify-tokens", "128", "--device", "cpu"]  # fmt: skip


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(f"Line {i}: the crow ate {i * 7 % 13} figs." for i in range(400)))
    return path


def command(model, out, text, *extra):
    return ["convert", str(model), str(out), "--data", str(text), *OPTIONS, *extra]


def errors(finished):
    return [line for line in finished.stderr.splitlines() if line.startswith("dotmoe: error")]


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["replicate", "shard"])
def test_ranks_convert_as_one_does(sharding, tiny_dense, text, tmp_path):
    model = tiny_dense("llama", tied=True, num_hidden_layers=3)
    assert run(command(model, tmp_path / "one", text)) == 0
    arguments = command(model, tmp_path / "two", text, "--sharding", sharding)
    finished = torchrun(2, "-m", "dotmoe", *arguments)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert finished.stdout.count("DOT-MoE") == 1, "the first rank alone prints"
    assert finished.stderr.count("align: 6 of 6") == 1
    files = [tmp_path / name / "3_extract" / "layout.safetensors" for name in ("one", "two")]
    one, two = map(ExpertLayout.load, files)
    moved = (one.expert_of_neuron_LN != two.expert_of_neuron_LN).float().mean()
    assert moved < 0.01
    assert torch.allclose(one.router_LED, two.router_LED, atol=1e-4)
    states = [
        load_file(tmp_path / name / "1_calibrate" / "state.safetensors") for name in ("one", "two")
    ]
    assert all(torch.equal(states[0][key], states[1][key]) for key in ("affinity", "router"))
    results = [
        json.loads((tmp_path / name / "6_evaluate" / "results.json").read_text())
        for name in ("one", "two")
    ]
    for name in ("dense", "moe"):
        there = results[0][name]["perplexity"]
        assert results[1][name]["perplexity"] == pytest.approx(there, rel=1e-4)
    assert results[1]["verification"]["largest_misrouted_share"] == 0


@pytest.mark.slow
def test_a_batch_that_ranks_cannot_share_is_refused_in_one_line(tiny_dense, text, tmp_path):
    arguments = command(tiny_dense("llama"), tmp_path / "run", text, "--batch-size", "5")
    finished = torchrun(2, "-m", "dotmoe", *arguments, timeout=240)
    assert finished.returncode != 0
    assert errors(finished) == [
        "dotmoe: error: batch_size is 5, but 2 ranks must share it equally. Choose 4 or 6."
    ]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_missing_text_ends_all_ranks_with_one_line(tiny_dense, tmp_path):
    arguments = command(tiny_dense("llama"), tmp_path / "run", tmp_path / "gone.txt")
    finished = torchrun(2, "-m", "dotmoe", *arguments, timeout=240)
    assert finished.returncode != 0
    (line,) = errors(finished)
    assert "gone.txt" in line
    assert not re.search(r'File ".*/dotmoe/', finished.stderr), "torchrun's own traceback is all"
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_what_one_rank_alone_lacks_is_told_once_with_its_number(tiny_dense, text, tmp_path):
    script = tmp_path / "start.py"
    script.write_text(
        "import os, sys\n"
        "import dotmoe.load\n"
        "from dotmoe.cli import run\n"
        "from dotmoe.errors import UserError\n"
        "def gone(source):\n"
        "    raise UserError(f'{source} does not exist.')\n"
        "if os.environ['RANK'] == '1':\n"
        "    dotmoe.load.describe_dense = gone\n"
        "sys.exit(run(sys.argv[1:]))\n"
    )
    model = tiny_dense("llama")
    finished = torchrun(2, script, *command(model, tmp_path / "run", text), timeout=240)
    assert finished.returncode != 0
    assert errors(finished) == [f"dotmoe: error: rank 1: {model} does not exist."]
    assert not (tmp_path / "run").exists()
