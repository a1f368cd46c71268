"""`torchrun -m dotmoe convert`. Oracle: the same command on one rank."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dotmoe import finetune_recipe
from dotmoe.cli import run
from dotmoe.method.layout import ExpertLayout
from dotmoe.pipeline import finetune as of_finetuning
from runs import PATIENCE_S, TINY_CONVERT, words

pytestmark = pytest.mark.usefixtures("all_rounds")  # which torchrun's processes have
KEEPING_NOTHING = Path(__file__).with_name("keeping_nothing.py")
"""Script that is `dotmoe`, but keeps no weights of tiny models that are left on disk."""


def command(model, out, text, **options):
    return words("convert", model, out, data=text, device="cpu", **TINY_CONVERT | options)


def torchrun(*arguments):
    """Run a script or `-m module` on two ranks, on gloo and the CPU, until it ends."""
    of_a_rank = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in of_a_rank}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run(
        [*command, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["replicate", "shard"])
def test_ranks_write_own_text_as_one_does_to_convert_and_to_finetune(
    sharding, tiny_dense, tmp_path, monkeypatch
):
    model, runs = tiny_dense("llama", max_position_embeddings=48), [tmp_path / n for n in "12"]
    how = TINY_CONVERT | {"steps": 0, "answer_tokens": 100, "device": "cpu"}
    tuning = {"recipe": "small", "steps": 2, "batch_size": 2, "seq_len": 32, "device": "cpu"}
    tuning["answer_tokens"] = 100
    for folder, start, options in zip(
        runs, (run, launched), ({}, {"sharding": sharding}), strict=True
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        assert start(words("convert", model, folder / "run", **how | options)) == 0
        tuned = words("finetune", folder / "run", folder / "tuned", **tuning | options)
        assert start(tuned) == 0
    for name in ("run", "tuned"):
        one, two = ((each / name / "0_answers/fitted.jsonl").read_text() for each in runs)
        assert one == two


def launched(arguments):
    done = torchrun("-m", "dotmoe", *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.returncode


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["replicate", "shard"])
def test_ranks_convert_as_one_does(sharding, tiny_dense, text_file, tmp_path):
    model, runs = tiny_dense("llama", tied=True, num_hidden_layers=3), [tmp_path / n for n in "12"]
    # The balance of experts is judged by micro-batches; batches of a training of FFNs differ.
    options = {"repair": [], "repair_epochs": 0, "micro_batch_size": 1}
    assert run(command(model, runs[0], text_file, **options)) == 0
    arguments = command(model, runs[1], text_file, **options, sharding=sharding)
    finished = torchrun(KEEPING_NOTHING, *arguments)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert finished.stdout.count(" times dense ") == 1, "the first rank alone prints"
    assert finished.stderr.count("align: 6 of 6") == 1
    one, two = (ExpertLayout.load(each / "3_extract/layout.safetensors") for each in runs)
    assert (one.expert_of_neuron_LN != two.expert_of_neuron_LN).float().mean() < 0.01
    assert torch.allclose(one.router_LED, two.router_LED, atol=1e-4)
    one, two = (load_file(each / "1_calibrate/state.safetensors") for each in runs)
    assert all(torch.equal(one[key], two[key]) for key in ("affinity", "router"))
    one, two = (json.loads((each / "6_evaluate/results.json").read_text()) for each in runs)
    for name in ("dense", "frozen", "moe"):
        assert two[name]["perplexity"] == pytest.approx(one[name]["perplexity"], rel=1e-4)
    assert two["verification"]["largest_misrouted_share"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "data", "message"),
    [
        (
            "3",
            "text.txt",
            "--batch-size is 3, but 2 ranks must share it equally. Choose a multiple",
        ),
        ("4", "gone.txt", "gone.txt does not exist"),
    ],
)
def test_what_ranks_cannot_run_is_refused_in_one_line(
    batch, data, message, tiny_dense, text_file, tmp_path
):
    out = tmp_path / "run"
    arguments = command(tiny_dense("llama"), out, text_file.parent / data, batch_size=batch)
    finished = torchrun("-m", "dotmoe", *arguments)
    assert finished.returncode != 0
    (line,) = re.findall(r"^dotmoe: error.*", finished.stderr, re.MULTILINE)
    assert message in line
    assert not re.search(r'File ".*/dotmoe/', finished.stderr), "torchrun's own traceback is all"
    assert not out.exists()


def test_the_default_finetuning_gives_each_of_eight_ranks_a_row_and_reads_as_much(monkeypatch):
    default = finetune_recipe(run="RUN", out="OUT")
    assert of_finetuning._for_each_rank(default) == default
    monkeypatch.setattr(of_finetuning, "num_ranks", lambda: 8)
    how, given = of_finetuning._for_each_rank(default).finetune, default.finetune
    assert how.batch_size == 8
    assert how.steps * how.batch_size == given.steps * given.batch_size
