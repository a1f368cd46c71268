"""The command line on tiny models: whole runs, interrupted runs, bad input."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dotmoe.cli import run
from dotmoe.layout import ExpertLayout
from dotmoe.load import LoadConfig, load_dense
from dotmoe.models.family import FAMILIES
from dotmoe.moe.surgery import masked_by

OPTIONS = [
    "--expert-size",
    "8",
    "--steps",
    "6",
    "--batch-size",
    "4",
    "--seq-len",
    "32",
    "--lr",
    "1e-2",
    "--checkpoint-every",
    "2",
]
SMALL = ["--calibration-tokens", "512", "--eval-tokens", "512", "--scale-tokens", "256",
         "--verify-tokens", "128"]  # fmt: skip


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    lines = [
        f"Line {i}: the {['cat', 'dog', 'crow'][i % 3]} ate {i * 7 % 13} figs." for i in range(400)
    ]
    path.write_text("\n".join(lines))
    return path


def command(model, out, text, *extra):
    return ["convert", str(model), str(out), "--data", str(text), *OPTIONS, *SMALL, *extra]


def spawn(arguments, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "dotmoe", *arguments], env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def same_tensors(one, other):
    first, second = load_file(one), load_file(other)
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_gives_a_stock_checkpoint_a_report_and_its_config(family, tiny_dense, text, tmp_path):
    out = tmp_path / "run"
    model = tiny_dense(family)
    assert run(command(model, out, text)) == 0
    results = json.loads((out / "6_evaluate" / "results.json").read_text())
    assert results["dense"]["origin"] == "measured"
    assert results["moe"]["perplexity"] > 1
    assert results["granularity"] == {
        "num_experts": 12,
        "expert_size": 8,
        "active_experts": 3,
        "shared_size": 0,
        "first_dense_layers": 0,
    }
    assert (out / "7_report" / "report.md").read_text().startswith("# ")
    assert len((out / "2_align" / "metrics.jsonl").read_text().splitlines()) == 6

    dense = load_dense(str(model), LoadConfig(device="cpu"))
    layout = ExpertLayout.load(out / "3_extract" / "layout.safetensors")
    tokens = torch.tensor([2 + b for b in text.read_bytes()[:200]]).view(20, 10)
    exported = AutoModelForCausalLM.from_pretrained(out / "5_export")
    twins = {"granite": "GraniteMoeForCausalLM", "olmo2": "FlexOlmoForCausalLM"}
    assert type(exported).__name__ == twins.get(family, "Glm4MoeForCausalLM")
    with masked_by(dense, layout), torch.no_grad():
        expected = dense.model(input_ids=tokens).logits
        difference = (exported(input_ids=tokens).logits - expected).abs() / expected.std()
    # The median over rows: a router logit within rounding of the k-th may flip a row's expert.
    assert difference.mean(dim=(1, 2)).median() < 1e-3


def test_the_written_config_repeats_the_run(tiny_dense, text, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    model = tiny_dense("llama")
    assert run(command(model, first, text)) == 0
    assert run(["convert", str(model), str(second), "--config", str(first / "config.json")]) == 0
    layout = Path("3_extract/layout.safetensors")
    assert same_tensors(first / layout, second / layout)


def test_no_steps_is_a_training_free_conversion(tiny_dense, text, tmp_path):
    out = tmp_path / "run"
    assert run(command(tiny_dense("llama"), out, text, "--steps", "0")) == 0
    assert not (out / "2_align" / "metrics.jsonl").exists()


@pytest.mark.slow  # tests/resilience kills runs in less time
def test_a_run_killed_while_aligning_ends_bit_identical(tiny_dense, text, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    model = tiny_dense("llama")
    longer = ["--steps", "40"]
    assert spawn(command(model, whole, text, *longer)).wait(300) == 0
    process = spawn(command(model, killed, text, *longer))
    checkpoints = killed / "2_align" / "checkpoints"
    deadline = time.monotonic() + 120
    while not list(checkpoints.glob("step_*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "finished" / "align").exists()
    assert not (whole / "2_align" / "checkpoints").exists()
    resumed = spawn(command(model, killed, text, *longer))
    resumed.communicate(timeout=300)
    assert resumed.returncode == 0
    for file in ("2_align/state.safetensors", "3_extract/layout.safetensors"):
        assert same_tensors(whole / file, killed / file)
    for file in (whole / "5_export").glob("*.safetensors"):
        assert same_tensors(file, killed / "5_export" / file.name)


def test_an_interrupt_says_how_to_go_on(tiny_dense, text, tmp_path):
    process = spawn(command(tiny_dense("llama"), tmp_path / "run", text, "--steps", "4000"))
    metrics = tmp_path / "run" / "2_align" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "SIGTERM stopped it after step" in error
    assert "the same command goes on" in error
    assert list((tmp_path / "run" / "2_align" / "checkpoints").glob("step_*"))
    assert "Traceback" not in error


def test_a_missing_model_is_said(text, tmp_path, capsys):
    assert run(command(tmp_path / "nowhere", tmp_path / "run", text)) == 2
    assert "does not exist" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_unknown_command_offers_the_nearest(capsys):
    assert run(["convrt"]) == 2
    assert "Did you mean convert" in capsys.readouterr().err


def test_a_folder_of_another_config_is_not_touched(tiny_dense, text, tmp_path, capsys):
    out = tmp_path / "run"
    model = tiny_dense("llama")
    assert run(command(model, out, text)) == 0
    assert run(command(model, out, text, "--seed", "1")) == 2
    assert "another config" in capsys.readouterr().err


@pytest.mark.slow  # tests/resilience fills disks in less time
@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="needs a file size limit")
@pytest.mark.parametrize("room", [500, 5_000, 100_000], ids=["config", "tokenise", "export"])
def test_a_full_disk_is_said_in_one_line_and_the_run_can_go_on(room, tiny_dense, text, tmp_path):
    import resource

    def little_room():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))

    out = tmp_path / "run"
    arguments = command(tiny_dense("llama"), out, text)
    process = spawn(arguments, preexec_fn=little_room)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "Traceback" not in error
    assert "dotmoe: error: " in error
    assert not (out / "5_export" / "config.json").exists()
    assert out.exists() == (out / "finished").exists()
    assert run(arguments) == 0
