"""Weights loaded straight into shards. Oracles: stock Transformers, and the kernel's own count."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from dotmoe.common.sharded import full_tensor, local_part
from dotmoe.models.family import FAMILIES
from dotmoe.models.load import describe_dense, is_sharded, read_weights

CPU = torch.device("cpu")
TOKENS = torch.arange(2, 50).view(2, 24)


def loaded(folder, mesh, dtype=torch.float32):
    return read_weights(describe_dense(str(folder)), CPU, dtype, mesh)


@pytest.mark.parametrize(("family_name", "tied"), [*product(FAMILIES, [False]), ("llama", True)])
def test_a_sharded_model_computes_what_transformers_does(family_name, tied, tiny_dense, ranks):
    folder = tiny_dense(family_name, tied=tied)
    model = loaded(folder, ranks)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for _ in range(2):
        hidden = model.model(input_ids=TOKENS, use_cache=False).last_hidden_state
        expected = stock.model(input_ids=TOKENS).last_hidden_state
        assert torch.equal(hidden, expected)
    assert torch.equal(full_tensor(model.lm_head.weight), stock.lm_head.weight)
    assert model.lm_head.weight is model.get_input_embeddings().weight or not tied


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_are_held_in_the_dtype_asked_for(dtype, tiny_dense, ranks):
    folder = tiny_dense("llama", dtype="bfloat16")
    model = loaded(folder, ranks, dtype)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    for one, other in zip(model.parameters(), stock.parameters(), strict=True):
        assert one.dtype == dtype
        assert torch.equal(local_part(one), other)


def test_only_what_takes_over_half_of_a_gpu_is_sharded_unasked(monkeypatch):
    memory, gpu = SimpleNamespace(total_memory=80), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    assert [is_sharded("auto", size, gpu) for size in (16, 65)] == [False, True]
    assert not is_sharded("auto", 65, CPU)
    assert not is_sharded("replicate", 65, gpu)
    assert is_sharded("shard", 1, CPU)
