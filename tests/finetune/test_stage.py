"""Training: what changes, resuming, and two ranks against one."""

from dataclasses import replace

import pytest
import torch
import two_ranks
from safetensors.torch import load_file
from two_ranks import CONFIG, torchrun

from dotmoe.data import TokenBlocks
from dotmoe.errors import UserError
from dotmoe.finetune import FinetuneConfig, Start, finetune, steps_to_take, wants_own_teacher
from dotmoe.layout import ExpertLayout
from dotmoe.load import LoadConfig, load_dense
from dotmoe.training.config import TrainingConfig


class StoppedError(Exception):
    """Stands for a kill."""


def trained(folder, model, layout, blocks, config=CONFIG, **options):
    folder.mkdir(exist_ok=True)
    dense = load_dense(str(model), LoadConfig())
    teacher = load_dense(str(model), LoadConfig()) if wants_own_teacher(config) else None
    start = Start(dense=dense, layout=layout, teacher=teacher)
    options = {"seed": 0, "router_dtype": torch.float32, **options}
    finetune(start, blocks, config, folder=folder, **options)
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
    model = tiny_dense("llama")
    config = replace(CONFIG, balance_weight=0.0, steps=2)
    plain = trained(tmp_path / "plain", model, layout, blocks, config)
    config = replace(config, activation_checkpointing=True, micro_batch_size=1)
    careful = trained(tmp_path / "careful", model, layout, blocks, config)
    for name, tensor in plain.items():
        torch.testing.assert_close(careful[name], tensor, rtol=1e-3, atol=1e-4)


def test_float16_is_refused(tiny_dense, layout, blocks, tmp_path):
    dense = load_dense(str(tiny_dense("llama")), LoadConfig(dtype="float16"))
    with pytest.raises(UserError, match="dtype is float16"):
        finetune(
            Start(dense=dense, layout=layout),
            blocks,
            CONFIG,
            folder=tmp_path,
            seed=0,
            router_dtype=torch.float32,
        )


def test_steps_are_lowered_to_the_data():
    assert steps_to_take(replace(CONFIG, steps=50), 16) == 40
    assert steps_to_take(replace(CONFIG, steps=50), 16_000) == 50
    assert FinetuneConfig().steps * 128 * 2048 >= 1.2e9 > (FinetuneConfig().steps - 1) * 128 * 2048


@pytest.mark.slow
@pytest.mark.parametrize("train", ["everything", "lora"])
def test_two_ranks_train_what_one_does(train, tiny_dense, layout, blocks, tmp_path):
    if train == "lora":
        pytest.importorskip("peft")
    model = tiny_dense("llama")
    layout.save(tmp_path / "start.safetensors")
    blocks.save(tmp_path / "blocks.safetensors")
    blocks = TokenBlocks.load(tmp_path / "blocks.safetensors")
    alone = trained(tmp_path / "alone", model, layout, blocks, replace(CONFIG, train=train))
    torchrun(two_ranks.__file__, train, model, tmp_path)
    for sharding in ("replicate", "shard"):
        together = weights(tmp_path / sharding)
        assert together.keys() == alone.keys()
        for name, tensor in alone.items():
            torch.testing.assert_close(together[name], tensor, rtol=1e-3, atol=1e-4)
