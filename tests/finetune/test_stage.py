"""Training: what changes, resuming, and two ranks against one."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from two_ranks import CONFIG, both_ways

from dotmoe.method.finetuning import finetune
from dotmoe.method.layout import ExpertLayout, save_layouts
from dotmoe.models.config import LoadConfig
from dotmoe.models.load import describe_dense
from dotmoe.training.config import TrainingConfig
from runs import on_ranks, slow_but, weights_of


@pytest.fixture
def train(tiny_dense, layout, blocks, tmp_path):
    """Trains in a folder of that name; the weights and routers that are then in it."""

    def run(name, config=CONFIG, *, family="llama", **options):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        options = {"seed": 0, "load": LoadConfig(device="cpu"), **options}
        dense = describe_dense(str(tiny_dense(family)))
        result = finetune(dense, layout, blocks, config, folder=folder, **options)
        found = weights(folder)
        assert torch.equal(result.router_LED, found["router"])
        return found

    return run


def weights(folder):
    router_LED = ExpertLayout.load(folder / "layout.safetensors").router_LED
    return weights_of(folder / "model") | {"router": router_LED}


@pytest.mark.parametrize("what", ["everything", "experts", "lora"])
def test_what_is_trained_changes_and_nothing_else(what, train, tiny_dense, layout):
    losses = []
    config = replace(CONFIG, train=what, steps=6, lr_router=1e-2)
    after = train(
        "run", config, family="qwen3", on_step=lambda step, metrics: losses.append(metrics["loss"])
    )
    before = load_file(tiny_dense("qwen3") / "model.safetensors")
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    projections = {name for name in before if "_proj" in name}
    experts = {name for name in before if ".mlp." in name}
    assert changed == {"everything": {*before}, "experts": experts, "lora": projections}[what]
    centred = layout.router_LED - layout.router_LED.mean(dim=1, keepdim=True)
    assert (after["router"] - centred).abs().max() > 1e-3
    assert what == "lora" or losses[-1] < losses[0]


def test_the_default_rate_is_a_share_of_the_weights(train, tiny_dense):
    before = load_file(tiny_dense("llama") / "model.safetensors")
    matrices = torch.cat([weight.flatten() for weight in before.values() if weight.dim() > 1])
    rate = 0.0005 * float(matrices.double().square().mean().sqrt())
    expected = train("given", replace(CONFIG, lr=rate))
    for name, weight in train("default", replace(CONFIG, lr=None)).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("error:FSDP2")
def test_recomputing_and_small_micro_batches_change_memory_only(train):
    """Plain tensors in float32; in bfloat16 the same under FSDP, whose first step is compared."""
    config = replace(CONFIG, balance_weight=0.0)
    careful = replace(config, activation_checkpointing=True, micro_batch_size=1)
    same = train("careful", careful)
    for name, tensor in train("plain", config).items():
        torch.testing.assert_close(same[name], tensor, rtol=1e-3, atol=1e-4)
    steps, load = [], LoadConfig(device="cpu", dtype="bfloat16")
    for name, each in (("plain16", config), ("careful16", careful)):
        train(name, each, load=load, on_step=lambda step, metrics: steps.append(metrics))
    assert steps[2]["loss"] == pytest.approx(steps[0]["loss"], rel=1e-3)
    assert steps[2]["grad_norm"] == pytest.approx(steps[0]["grad_norm"], rel=0.02)


@pytest.mark.parametrize("what", slow_but(["experts", "lora"], ["everything", "experts", "lora"]))
def test_offloaded_weights_are_trained_to_the_same_bits_also_from_a_checkpoint(what, train):
    config, load = replace(CONFIG, train=what), LoadConfig(device="cpu", dtype="bfloat16")
    plain, stops = train("plain", config, load=load), iter([False, True])

    def stop(step, metrics):
        if next(stops, False):
            raise KeyboardInterrupt

    how = {"load": load, "training": TrainingConfig(checkpoint_every=1), "on_step": stop}
    offloaded = replace(config, offload=True)
    with pytest.raises(KeyboardInterrupt):
        train("offloaded", offloaded, **how)
    for name, tensor in train("offloaded", offloaded, **how).items():
        assert torch.equal(tensor, plain[name]), name


@pytest.mark.parametrize("what", slow_but(["experts"], ["everything", "experts", "lora"]))
def test_two_ranks_train_what_one_does(what, train, tiny_dense, layout, blocks, tmp_path):
    """Also in 16 bits, where weights that are replicated are computed with as sharded ones are."""
    save_layouts((layout,), tmp_path)
    blocks.save(tmp_path / "blocks.safetensors")
    alone = train("alone", replace(CONFIG, train=what))
    dtypes = ["float32", "bfloat16"] if what != "lora" else ["float32"]
    on_ranks(2, both_ways, tiny_dense("llama"), tmp_path, what, dtypes)
    first_steps = []
    for sharding in ("replicate", "shard"):
        together = weights(tmp_path / f"{sharding}-float32")
        assert together.keys() == alone.keys()
        for name, tensor in alone.items():
            torch.testing.assert_close(together[name], tensor, rtol=1e-3, atol=1e-4)
        log = tmp_path / f"{sharding}-{dtypes[-1]}" / "metrics.jsonl"
        first_steps.append(json.loads(log.read_text().split("\n")[0]))
    assert first_steps[0]["loss"] == first_steps[1]["loss"]
    assert first_steps[0]["grad_norm"] == pytest.approx(first_steps[1]["grad_norm"], rel=1e-4)
