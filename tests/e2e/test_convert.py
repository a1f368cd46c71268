"""`dotmoe convert` on tiny models: whole runs of every family, and a run that is stopped."""

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

from dotmoe.layout import ExpertLayout
from dotmoe.load import LoadConfig, load_dense
from dotmoe.models.family import FAMILIES
from dotmoe.moe.masked import masked_by

TWINS = {"granite": "GraniteMoeForCausalLM", "olmo2": "FlexOlmoForCausalLM"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_gives_a_stock_checkpoint_that_computes_what_its_layout_says(
    family, finished, tiny_dense, tokens_BT, tmp_path
):
    model = tiny_dense(family)
    made = finished
    if family != "llama":
        made = type(finished)("convert", model, tmp_path / "run", finished.options).made()
    dense = load_dense(str(model), LoadConfig(device="cpu"))
    layout = ExpertLayout.load(made.folder / "3_extract" / "layout.safetensors")
    exported = AutoModelForCausalLM.from_pretrained(made.folder / "5_export")
    assert type(exported).__name__ == TWINS.get(family, "Glm4MoeForCausalLM")
    rows = tokens_BT.view(24, 16)
    with masked_by(dense, layout), torch.no_grad():
        expected = dense.model(input_ids=rows).logits
        difference = (exported(input_ids=rows).logits - expected).abs() / expected.std()
    # The median over rows: a router logit within rounding of the k-th may flip a row's expert.
    assert difference.mean(dim=(1, 2)).median() < 1e-3


def test_the_written_config_repeats_the_run(finished, command, tmp_path):
    again = ["--config", finished.folder / "config.json"]
    assert command("convert", finished.source, tmp_path / "run", *again).status == 0
    layouts = [
        load_file(folder / "3_extract/layout.safetensors")
        for folder in (finished.folder, tmp_path / "run")
    ]
    assert all(torch.equal(layouts[0][name], layouts[1][name]) for name in layouts[0])


def test_no_steps_is_a_training_free_conversion(finished, command, tmp_path):
    assert command(*finished.at(tmp_path / "run", steps=0).command()).status == 0
    assert not (tmp_path / "run/2_align/metrics.jsonl").exists()


def test_a_folder_of_another_config_is_not_touched(finished, command, tmp_path):
    made = finished.copied_to(tmp_path / "run")
    before = made.contents()
    assert "another config" in command(*made.command(seed=1)).refusal()
    assert made.contents() == before


def test_an_interrupt_says_how_to_go_on(finished, tmp_path):
    made = finished.at(tmp_path / "run", steps=4000, max_epochs=10_000)
    process = subprocess.Popen(
        [sys.executable, "-m", "dotmoe", *made.command()],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not (made.folder / "2_align/metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "SIGTERM stopped it after step" in error
    assert "the same command goes on" in error
    assert list((made.folder / "2_align/checkpoints").glob("step_*"))
    assert "Traceback" not in error


def test_results_say_what_was_measured(finished):
    results = json.loads(Path(finished.folder / "6_evaluate/results.json").read_text())
    assert results["dense"]["origin"] == "measured"
    assert results["moe"]["perplexity"] > 1
    found = {name: results["granularity"][name] for name in ("num_experts", "expert_size")}
    assert found == {"num_experts": 12, "expert_size": 8}
    assert (finished.folder / "7_report/report.md").read_text().startswith("# ")
