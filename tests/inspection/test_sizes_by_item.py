"""Sizes by item. Oracles: autograd, the stock architecture, and counts by hand."""

import pytest
import torch
from inspected_models import TINY, inspection, llama_3_8b, masked_model, sizes, step, tiny
from transformers import Glm4MoeConfig, LlamaConfig, Qwen2Config, Qwen3Config

from dotmoe.measure.inspection.sizes import exported_bytes, kept_per_token, step_memory
from dotmoe.models.meta_model import meta_model

E = 16
KEPT = "activations kept for the backward"
CHUNK = "buffers of one layer, or one chunk of logits"


def bytes_autograd_keeps(model, tokens_BT):
    """Storages that autograd saves in a forward pass, parameters left out."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model.model(input_ids=tokens_BT, use_cache=False).last_hidden_state
        del output
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_the_activation_estimate_is_what_autograd_really_keeps(kind, dtype):
    tokens = torch.randint(0, 512, (1, 128))
    shallow, deep = (
        bytes_autograd_keeps(masked_model(tiny(kind, num_hidden_layers=n), dtype, E), tokens)
        for n in (2, 4)
    )
    real = (deep - shallow) / 2 / tokens.numel()
    estimate = kept_per_token(step(sizes(tiny(kind), experts=E), weight_bytes=dtype.itemsize))
    assert estimate == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("first_dense", [0, 1])
def test_the_exported_size_is_that_of_the_architecture(kind, tied, dtype, first_dense):
    config = tiny(kind, tie_word_embeddings=tied)
    shared = {name: TINY[name] for name in TINY if name != "intermediate_size"}
    served = Glm4MoeConfig(
        **shared,
        intermediate_size=256,
        moe_intermediate_size=16,
        n_routed_experts=E,
        num_experts_per_tok=4,
        n_shared_experts=1,
        first_k_dense_replace=first_dense,
        attention_bias=kind is Qwen2Config,
        tie_word_embeddings=False,
    )
    model = meta_model(served)
    parameters = sum(p.numel() for p in model.parameters())
    biases = sum(b.numel() for name, b in model.named_buffers() if "correction_bias" in name)
    found = sizes(config, experts=E, written=dtype, first_dense_layers=first_dense)
    assert sum(exported_bytes(found).values()) == dtype.itemsize * parameters + 4 * biases


def test_memory_and_disk_by_hand_for_llama_3():
    found, tokens = sizes(llama_3_8b()), 2 * 2_048
    plain, again = (
        step_memory(step(found, micro_batch_size=2, checkpointing=flag)) for flag in (False, True)
    )
    assert plain["dense weights"] == 2 * 8_030_261_248
    plan, routers = 32 * 14_336 * 112, 32 * 112 * 4_096
    assert plain["soft plan and gradients"] == 4 * (plan + plan + routers)
    a_layer = 2 * (2 * 14_336 + 2 * (32 + 8) * 128) + 4 * (3 * 4_096 + 4 * 112)
    assert plain[KEPT] == 32 * tokens * a_layer
    assert again[KEPT] == tokens * (32 * 2 * 4_096 + a_layer)
    assert plain[CHUNK] == 5 * 2 * 14_336 * tokens
    assert {name for name in plain if plain[name] != again[name]} == {KEPT}
    said = inspection(llama_3_8b(), data=("text.txt",))["disk"]
    assert said["dense checkpoint (unless it is there)"] == 2 * 8_030_261_248
    assert said["tokenise"] == 4 * (3_500 * 64 * 2_048 + 32_768)
    assert said["alignment"] == 2 * 3 * 4 * (plan + routers)


def test_layers_that_stay_dense_cost_no_split():
    every, half = (inspection(llama_3_8b(), first_dense_layers=n) for n in (0, 16))
    all_split, half_split = (each["plans"][0]["choices"][1] for each in (every, half))
    for name in ("affinities, routers, Adam", "soft plan and gradients"):
        assert half_split["memory"][name] == all_split["memory"][name] // 2
    zeros = "zero shared expert of the format"
    assert half["exported"][zeros] == every["exported"][zeros] // 2
    assert half_split["step_s"] < all_split["step_s"]


@pytest.mark.parametrize(
    ("on_cpu", "memory_bytes", "rows"),
    [
        *[(True, 24 << 30, 128), (False, 0, 167), (False, 8 << 30, 167)],
        # 2^28 logits on 80 GB, rounded down to a power of two: 1.25 % of it in float32.
        *[(False, 80 << 30, 1_342), (False, 79 << 30, 1_342), (False, 141 << 30, 2_684)],
    ],
)
def test_a_large_vocabulary_needs_one_chunk_of_logits(on_cpu, memory_bytes, rows):
    found, device = sizes(tiny(vocab_size=200_000)), {"on_cpu": on_cpu}
    device["memory_bytes"] = memory_bytes
    estimate = step_memory(step(found, micro_batch_size=4, seq_len=1_024, **device))
    # Three tensors in float32, and the logits themselves in bfloat16.
    assert estimate[CHUNK] == (3 * 4 + 2) * rows * 200_000


def test_what_is_trained_decides_the_memory_of_finetuning_by_hand():
    found, routers = sizes(llama_3_8b()), 32 * 112 * 4_096
    adapters = 32 * 16 * (4 * 4_096 + 2 * (4_096 + 1_024) + 3 * 112 * (4_096 + 128))
    trained = {"everything": 8_030_261_248, "experts": 32 * 3 * 4_096 * 14_336, "lora": adapters}
    for name, count in trained.items():
        items = step_memory(step(found, train=name))
        assert items["trained weights in float32, gradients, Adam"] == 16 * (count + routers)
