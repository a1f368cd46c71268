"""`torchrun -m dotmoe convert`. Oracle: the same command on one rank."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from dotmoe.cli import run
from dotmoe.layout import ExpertLayout
from runs import TINY_CONVERT, torchrun, words


def command(model, out, text, **options):
    return words("convert", model, out, data=text, device="cpu", **TINY_CONVERT | options)


def errors(finished):
    return [line for line in finished.stderr.splitlines() if line.startswith("dotmoe: error")]


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["replicate", "shard"])
def test_ranks_convert_as_one_does(sharding, tiny_dense, text_file, tmp_path):
    model = tiny_dense("llama", tied=True, num_hidden_layers=3)
    options = {"repair": [], "micro_batch_size": 1}  # by which the balance of experts is judged
    assert run(command(model, tmp_path / "one", text_file, **options)) == 0
    arguments = command(model, tmp_path / "two", text_file, **options, sharding=sharding)
    finished = torchrun(2, "-m", "dotmoe", *arguments)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert finished.stdout.count("Perplexity per token") == 1, "the first rank alone prints"
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
    for name in ("dense", "frozen", "moe"):
        there = results[0][name]["perplexity"]
        assert results[1][name]["perplexity"] == pytest.approx(there, rel=1e-4)
    assert results[1]["verification"]["largest_misrouted_share"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "data", "said"),
    [
        (
            "3",
            "text.txt",
            "batch_size is 3, but 2 ranks must share it equally. Choose a multiple of 2.",
        ),
        ("4", "gone.txt", "gone.txt does not exist"),
    ],
)
def test_what_ranks_cannot_run_is_refused_in_one_line(
    batch, data, said, tiny_dense, text_file, tmp_path
):
    out = tmp_path / "run"
    arguments = command(tiny_dense("llama"), out, text_file.parent / data, batch_size=batch)
    finished = torchrun(2, "-m", "dotmoe", *arguments)
    assert finished.returncode != 0
    (line,) = errors(finished)
    assert said in line
    assert not re.search(r'File ".*/dotmoe/', finished.stderr), "torchrun's own traceback is all"
    assert not out.exists()
