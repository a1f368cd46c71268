"""`dotmoe finetune RUN OUT`, what comes out of it, and what it refuses."""

import math
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader

from dotmoe.common.files import read_json
from dotmoe.measure.evaluate.models import stock_nats
from dotmoe.method.layout import ExpertLayout
from dotmoe.method.masked import masked_by
from dotmoe.run.config import finetune_recipe
from dotmoe.text.blocks import TokenBlocks
from export.comparison import masked_logits, relative_error, stock_logits
from runs import TINY_FINETUNE, loaded, put_into, weights_of


def test_a_run_is_finetuned_measured_and_exported_again(finished, finetuned, command, tmp_path):
    out, results, earlier = finetuned.folder, finetuned.results(), finished.results()
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
    again, quick = tmp_path / "again", {"scale_tokens": 256, "verify_tokens": 128}
    assert command("export", out, again, format="mixtral", **quick).status == 0
    tokens = heldout[:2].long()
    expected = masked_logits(trained, layout, tokens)
    assert relative_error(stock_logits(again, tokens), expected) < 5e-3
    twice = command("finetune", out, tmp_path / "twice", **finetuned.options)
    assert "is finetuned already" in twice.refusal()
    resumed = command(*finetuned.copied_to(tmp_path / "copy").command())
    assert (resumed.status, "finetune (everything)" in resumed.err) == (0, False)


@pytest.mark.parametrize("name", ["sft", "paper"])
def test_the_recipes_have_the_papers_hyperparameters(name):
    config = finetune_recipe(name, run="", out="")
    tuning = config.finetune
    is_papers = tuning.surrogate, tuning.unchosen, tuning.router_dtype, tuning.max_epochs
    assert (is_papers == ("softmax", "zero", "model", None)) == (name == "paper")
    assert (tuning.lr, tuning.warmup_ratio, tuning.batch_size) == (5e-5, 0.1, 128)
    assert (tuning.max_grad_norm, tuning.balance_weight) == (1.0, 1e-4)
    assert tuning.steps * tuning.batch_size * config.data.seq_len >= 1.2e9


def test_text_that_has_changed_since_the_run_read_it_is_refused(finished, command, tmp_path):
    """A finetuning without --data reads what its run read."""
    run = finished.copied_to(tmp_path / "run").folder
    recorded = read_json(run / "manifest.json")["inputs"]
    put_into(run / "manifest.json", inputs=recorded | {"text 1": "0" * 64})
    line = command("finetune", run, tmp_path / "out", **TINY_FINETUNE).refusal()
    assert "has changed since the run read it. Restore it, or name the text" in line
    assert not (tmp_path / "out").exists()


def test_a_run_finetuned_from_elsewhere_says_where_its_text_is(finished, command, tmp_path):
    run = finished.copied_to(tmp_path / "run").folder
    config = read_json(run / "manifest.json")["config"]
    config["data"]["data"] = ["texts/mine.txt"]
    put_into(run / "manifest.json", config=config)
    line = command("finetune", run, tmp_path / "out", **TINY_FINETUNE).refusal()
    assert f"the text of {run} cannot be read again from {Path.cwd()}: texts/mine.txt does" in line
    assert "--data" in line
    assert not (tmp_path / "out").exists()


def test_the_dense_model_of_a_finetuned_run_is_exported_as_it_was(finetuned, finished, command):
    """Not with the weights that were trained, all of them on."""
    out = finetuned.folder.parent / "dense_again"
    options = {"format": "gguf_dense", "gguf_type": "f32", "scale_tokens": 256}
    assert command("export", finetuned.folder, out, **options).status == 0
    written = {each.name: each.data for each in GGUFReader(out / "model-f32.gguf").tensors}
    stored = weights_of(finished.source)
    for layer in range(2):
        found = torch.from_numpy(written[f"blk.{layer}.ffn_down.weight"].copy())
        assert torch.equal(found, stored[f"model.layers.{layer}.mlp.down_proj.weight"].float())


def test_a_run_used_from_elsewhere_says_where_its_model_is(finished, command, tmp_path):
    run = finished.copied_to(tmp_path / "run").folder
    put_into(run / "manifest.json", model="models/dense")
    line = command("export", run, tmp_path / "out").refusal()
    assert f"{run} was made from the model models/dense, which is not there from {Path.cwd()}." in (
        line
    )
