"""`dotmoe finetune RUN OUT`, what comes out of it, and what it refuses."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dotmoe.cli import run
from dotmoe.measure.evaluate.models import stock_nats
from dotmoe.method.layout import ExpertLayout
from dotmoe.method.masked import masked_by
from dotmoe.run.config import finetune_recipe
from dotmoe.text.blocks import TokenBlocks
from runs import loaded

QUICK = ["--scale-tokens", "256", "--verify-tokens", "128"]
TRAIN = ["--recipe", "sft", "--steps", "6", "--batch-size", "4", "--seq-len", "32", *QUICK]
TRAIN += ["--lr", "1e-3"]


def test_a_run_is_finetuned_measured_and_exported_again(finished, tmp_path, capsys):
    source = finished.folder
    before = finished.contents()
    out = tmp_path / "out"
    assert run(["finetune", str(source), str(out), *TRAIN]) == 0
    said = capsys.readouterr()
    assert [word in said.out for word in ("dense", "converted", "finetuned")] == [True] * 3
    assert finished.contents() == before
    results = json.loads((out / "6_evaluate" / "results.json").read_text())
    earlier = json.loads((source / "6_evaluate" / "results.json").read_text())
    assert results["dense"] == earlier["dense"]
    # Measured again, so equal up to the order of the machine's sums.
    assert results["converted"]["loss"] == pytest.approx(earlier["moe"]["loss"], rel=1e-6)
    assert results["converted"]["text"] == earlier["moe"]["text"]
    assert results["moe"]["loss"] < results["converted"]["loss"]
    heldout = TokenBlocks.load(out / "0_data" / "heldout.safetensors").tokens_BT
    trained = loaded(out / "4_finetune" / "model")
    layout = ExpertLayout.load(out / "4_finetune" / "layout.safetensors")
    with masked_by(trained, layout):
        nats = float(stock_nats(trained.model)(heldout).sum())
    assert math.isclose(nats / results["moe"]["tokens"], results["moe"]["loss"], abs_tol=5e-3)
    assert not (out / "4_finetune" / "checkpoints").exists()
    again = tmp_path / "again"
    assert run(["export", str(out), str(again), "--format", "mixtral", *QUICK]) == 0
    tokens = heldout[:2].long()
    with torch.no_grad(), masked_by(trained, layout):
        expected = trained.model(input_ids=tokens).logits
        found = AutoModelForCausalLM.from_pretrained(again)(input_ids=tokens).logits
    assert float((found - expected).abs().mean() / expected.std()) < 5e-3
    assert run(["finetune", str(out), str(tmp_path / "twice"), *TRAIN]) == 2
    assert "is finetuned already" in capsys.readouterr().err
    assert run(["finetune", str(source), str(out), *TRAIN]) == 0
    assert "finetune (everything)" not in capsys.readouterr().err


def test_lora_without_its_package_is_refused(finished, tmp_path, command, monkeypatch):
    monkeypatch.setattr("dotmoe.common.errors.find_spec", lambda name: None)
    refused = command("finetune", finished.folder, tmp_path / "out", train="lora").refusal()
    assert "pip install -e '.[lora]'" in refused
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_documents_example_runs(finished, tmp_path, monkeypatch, capsys):
    document = Path(__file__).parents[2] / "docs/guides/quality.md"
    example = re.search(r"```python\n(.*?)```", document.read_text(), re.DOTALL)[1]
    example = example.replace("quickstart-run/dot_moe", str(finished.folder))
    example = example.replace('"repaired"', '"converted"')  # as this run is
    monkeypatch.chdir(tmp_path)
    exec(example.replace("steps=60", "steps=2"), {})
    *figures, export = capsys.readouterr().out.splitlines()
    results = json.loads(Path("finetuned/6_evaluate/results.json").read_text())
    names = ("dense", "converted", "moe")
    assert figures == [f"{name} {results[name]['perplexity']}" for name in names]
    assert AutoModelForCausalLM.from_pretrained(export)


@pytest.mark.parametrize("name", ["sft", "paper"])
def test_the_recipes_have_the_papers_hyperparameters(name):
    config = finetune_recipe(name, run="", out="")
    tuning = config.finetune
    is_papers = tuning.surrogate, tuning.unchosen, tuning.router_dtype, tuning.max_epochs
    assert (is_papers == ("softmax", "zero", "model", None)) == (name == "paper")
    assert (tuning.lr, tuning.warmup_ratio, tuning.batch_size) == (5e-5, 0.1, 128)
    assert (tuning.max_grad_norm, tuning.balance_weight) == (1.0, 1e-4)
    assert tuning.steps * tuning.batch_size * config.data.seq_len >= 1.2e9
