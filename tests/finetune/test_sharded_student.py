"""A student read straight into shards. Oracles: the student made of a whole model, the kernel."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import two_ranks
from two_ranks import torchrun, unloaded_dense

from dotmoe.distributed import whole
from dotmoe.errors import UserError
from dotmoe.finetune.config import FinetuneConfig
from dotmoe.finetune.sharded import sharded_student
from dotmoe.finetune.student import Student
from dotmoe.layout import ALWAYS_ON
from dotmoe.load import LoadConfig, load_dense

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "granite", "olmo2", "phi3")


@pytest.fixture(scope="module")
def line_of_one():
    """A mesh of this process alone, over which FSDP2 shards all the same."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def both(folder, layout, config, mesh, dtype="float32"):
    """The student made of a whole model, and the one read from its files."""
    dense = load_dense(str(folder), LoadConfig(dtype=dtype))
    described = unloaded_dense(str(folder), getattr(torch, dtype))
    read = sharded_student(described, layout, config, mesh, seed=1)
    return Student(dense, layout, config, seed=1), read


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_is_what_it_would_be_of_a_whole_model(
    family, tiny_dense, layout, blocks, line_of_one
):
    folder, config = tiny_dense(family, tied=family == "llama", dtype="bfloat16"), FinetuneConfig()
    made, read = both(folder, layout, config, line_of_one)
    expected, found = made.trained(), read.trained()
    assert found.keys() == expected.keys()
    assert all(torch.equal(whole(found[name]), p) for name, p in expected.items())
    tokens = blocks.tokens_BT[:2].long()
    torch.testing.assert_close(read(tokens, None, config).ce, made(tokens, None, config).ce)


def test_shared_and_dense_parts_are_read_too(tiny_dense, layout, line_of_one):
    assignment = layout.expert_of_neuron_LN.clone()
    assignment[0] = ALWAYS_ON
    assignment[1][assignment[1] == 5] = ALWAYS_ON
    mixed = replace(layout, expert_of_neuron_LN=assignment, router_LED=layout.router_LED[:, :5])
    made, read = both(tiny_dense("phi3"), mixed, FinetuneConfig(), line_of_one)
    names = dict(read.model.named_parameters())
    for name, parameter in made.model.named_parameters():
        assert torch.equal(whole(names[name]), parameter), name
    assert made.ffns[0].shared_down_MD is not None
    assert len(made.ffns) == 1


@pytest.mark.parametrize("train", ["everything", "router", "lora"])
def test_what_is_trained_is_float32_and_what_stays_has_the_models_dtype(
    train, tiny_dense, layout, blocks, line_of_one
):
    if train == "lora":
        pytest.importorskip("peft")
    folder, config = tiny_dense("phi3", dtype="bfloat16"), FinetuneConfig(train=train)
    made, read = both(folder, layout, config, line_of_one, "bfloat16")
    assert read.trained().keys() == made.trained().keys()
    names = dict(read.model.named_parameters())
    for name, parameter in made.model.named_parameters():
        wanted = torch.float32 if parameter.requires_grad else torch.bfloat16
        assert parameter.dtype == names[name].dtype == wanted
        assert torch.equal(whole(names[name]), parameter), name
    tokens, losses = blocks.tokens_BT[:2].long(), []
    for student in (made, read):
        loss = student(tokens, None, config).total
        loss.backward()
        losses.append(loss.detach())
        assert {p.grad.dtype for p in student.trained().values()} == {torch.float32}
    torch.testing.assert_close(*losses, rtol=0.02, atol=0.02)


def test_a_missing_tensor_is_named(tiny_dense, layout, line_of_one):
    dense = unloaded_dense(str(tiny_dense("llama")), torch.float32)
    other = tiny_dense("llama", num_hidden_layers=1)
    with pytest.raises(UserError, match=r"layers\.1\..* is not in the checkpoint"):
        sharded_student(replace(dense, folder=other), layout, FinetuneConfig(), line_of_one, seed=0)


@pytest.mark.slow
def test_no_rank_holds_the_whole_model_while_it_is_read(tiny_dense, tmp_path):
    """Growth of each process's resident memory, mapped files included, at its peak."""
    model = tiny_dense(
        "llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=8, vocab_size=20000
    )
    torchrun(two_ranks.__file__, "peak", model, tmp_path)
    size = (model / "model.safetensors").stat().st_size
    largest = 20000 * 512 * 4 / 2
    for rank in (0, 1):
        seen = torch.load(tmp_path / f"peak.{rank}.pt")
        assert seen["shard"] < size / 2 + largest + 0.05 * size
        assert seen["whole"] > 0.95 * size
