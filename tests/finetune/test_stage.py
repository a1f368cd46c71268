"""Training: what changes, resuming, and two ranks against one."""

import json
from dataclasses import replace

import pytest
import torch
import two_ranks
from safetensors.torch import load_file
from two_ranks import CONFIG

from dotmoe.data import TokenBlocks
from dotmoe.finetuning import finetune
from dotmoe.layout import ExpertLayout
from dotmoe.load import LoadConfig, describe_dense
from dotmoe.training.loop import TrainingConfig
from runs import torchrun


class StoppedError(Exception):
    """Stands for a kill."""


def trained(folder, model, layout, blocks, config=CONFIG, **options):
    folder.mkdir(exist_ok=True)
    options = {"seed": 0, "load": LoadConfig(device="cpu"), **options}
    result = finetune(describe_dense(str(model)), layout, blocks, config, folder=folder, **options)
    assert result.model_folder == folder / "model"
    return weights(folder)


def weights(folder):
    tensors = {}
    for file in sorted((folder / "model").glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors | {"router": ExpertLayout.load(folder / "layout.safetensors").router_LED}


@pytest.mark.parametrize("train", ["everything", "router", "lora"])
def test_what_is_trained_changes_and_nothing_else(train, tiny_dense, layout, blocks, tmp_path):
    if train == "lora":
        pytest.importorskip("peft")
    model, losses = tiny_dense("qwen3"), []
    config = replace(CONFIG, train=train, steps=6, lr_router=1e-2)
    after = trained(
        tmp_path / "run",
        model,
        layout,
        blocks,
        config,
        on_step=lambda step, metrics: losses.append(metrics["loss"]),
    )
    before = load_file(model / "model.safetensors")
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    projections = {name for name in before if "_proj" in name}
    assert changed == {"everything": before.keys(), "router": set(), "lora": projections}[train]
    centred = layout.router_LED - layout.router_LED.mean(dim=1, keepdim=True)
    assert (after["router"] - centred).abs().max() > 1e-3
    if train == "everything":
        assert losses[-1] < losses[0]


def test_a_run_that_was_stopped_goes_on_to_the_same_weights(tiny_dense, layout, blocks, tmp_path):
    model, training = tiny_dense("llama"), TrainingConfig(checkpoint_every=2)
    config = replace(CONFIG, kl_weight=0.0)
    whole = trained(tmp_path / "whole", model, layout, blocks, config)

    def stop(step, metrics):
        if step == 3:
            raise StoppedError

    with pytest.raises(StoppedError):
        trained(tmp_path / "cut", model, layout, blocks, config, training=training, on_step=stop)
    steps = []
    resumed = trained(
        tmp_path / "cut",
        model,
        layout,
        blocks,
        config,
        training=training,
        on_step=lambda step, metrics: steps.append(step),
    )
    assert steps == [3, 4]
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())


def test_recomputing_and_small_micro_batches_change_memory_only(
    tiny_dense, layout, blocks, tmp_path
):
    """Plain tensors in float32; in bfloat16 the same under FSDP, whose first step is compared."""
    model = tiny_dense("llama")
    config = replace(CONFIG, balance_weight=0.0, steps=2)
    careful = replace(config, activation_checkpointing=True, micro_batch_size=1)
    plain = trained(tmp_path / "plain", model, layout, blocks, config)
    same = trained(tmp_path / "careful", model, layout, blocks, careful)
    for name, tensor in plain.items():
        torch.testing.assert_close(same[name], tensor, rtol=1e-3, atol=1e-4)
    steps, load = [], LoadConfig(device="cpu", dtype="bfloat16")
    for name, each in (("plain16", config), ("careful16", careful)):
        trained(tmp_path / name, model, layout, blocks, each, load=load,
                on_step=lambda step, metrics: steps.append(metrics))  # fmt: skip
    assert steps[2]["loss"] == pytest.approx(steps[0]["loss"], rel=1e-3)
    assert steps[2]["grad_norm"] == pytest.approx(steps[0]["grad_norm"], rel=0.02)


@pytest.mark.parametrize("train", ["everything", pytest.param("lora", marks=pytest.mark.slow)])
def test_two_ranks_train_what_one_does(train, tiny_dense, layout, blocks, tmp_path):
    """Also in 16 bits, where weights that are replicated are computed with as sharded ones are."""
    if train == "lora":
        pytest.importorskip("peft")
    model = tiny_dense("llama")
    layout.save(tmp_path / "start.safetensors")
    blocks.save(tmp_path / "blocks.safetensors")
    blocks = TokenBlocks.load(tmp_path / "blocks.safetensors")
    alone = trained(tmp_path / "alone", model, layout, blocks, replace(CONFIG, train=train))
    dtypes = ["float32", "bfloat16"] if train == "everything" else ["float32"]
    finished = torchrun(2, two_ranks.__file__, train, model, tmp_path, *dtypes)
    assert finished.returncode == 0, finished.stderr[-3000:]
    for sharding in ("replicate", "shard"):
        together = weights(tmp_path / f"{sharding}-float32")
        assert together.keys() == alone.keys()
        for name, tensor in alone.items():
            torch.testing.assert_close(together[name], tensor, rtol=1e-3, atol=1e-4)
    if train == "everything":
        lines = [
            json.loads(
                (tmp_path / f"{sharding}-bfloat16" / "metrics.jsonl").read_text().split("\n")[0]
            )
            for sharding in ("replicate", "shard")
        ]
        assert lines[0]["loss"] == lines[1]["loss"]
        assert lines[0]["grad_norm"] == pytest.approx(lines[1]["grad_norm"], rel=1e-4)
