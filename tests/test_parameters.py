"""Parameter counts. Oracles: the paper's table, published sizes, models in memory."""

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from dotmoe.export.parameters import count_parameters
from dotmoe.method.config import ExpertsConfig
from dotmoe.method.granularity import resolve, splits_of
from dotmoe.models.family import family_of, meta_model
from dotmoe.run.config import recipe

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
HEADS = ("num_attention_heads", "num_key_value_heads")


def published(kind, *sizes, tied=False):
    return kind(**dict(zip(SIZES + HEADS, sizes, strict=True)), tie_word_embeddings=tied)


LLAMA_2_7B = published(LlamaConfig, 32_000, 4_096, 11_008, 32, 32, 32)
LLAMA_3_8B = published(LlamaConfig, 128_256, 4_096, 14_336, 32, 32, 8)
QWEN_2_5_7B = published(Qwen2Config, 152_064, 3_584, 18_944, 28, 28, 4)
QWEN_2_5_HALF_B = published(Qwen2Config, 151_936, 896, 4_864, 24, 14, 2, tied=True)


def counts(config, **settings):
    granularity = resolve(ExpertsConfig(**settings), config.intermediate_size)
    return count_parameters(meta_model(config), family_of(config), (granularity,))


@pytest.mark.parametrize(
    ("config", "settings", "total", "active"),
    [
        (LLAMA_3_8B, {"active_experts": 28}, 8_030_261_248, 3_802_402_816),
        (QWEN_2_5_7B, {"active_experts": 37}, 7_615_616_512, 3_338_212_864),
        (QWEN_2_5_7B, {"active_experts": 74}, 7_615_616_512, 4_764_014_080),
        (LLAMA_2_7B, {"active_experts": 22}, 6_738_415_616, 3_517_190_144),
        (LLAMA_2_7B, {"expert_size": 64, "active_experts": 43}, 6_738_415_616, 3_492_024_320),
    ],
)
def test_active_parameters_are_the_papers_to_the_digit(config, settings, total, active):
    counted = counts(config, **settings)
    assert (counted.dense_total, counted.active) == (total, active)


def test_the_papers_attention_setting_is_a_recipe_and_its_counts_are_exact():
    (split,) = splits_of(recipe("qwen25_7b_attention").experts, 18_944, 28)
    assert (split.num_experts, split.expert_size, split.active_experts) == (14, 2, 7)
    found = count_parameters(meta_model(QWEN_2_5_7B), family_of(QWEN_2_5_7B), (split,))
    idle = 28 * 14 * (128 * 3_584 * 2 + 128)  # layers, idle heads, W_Q, W_O and the bias of W_Q
    assert (found.dense_total, found.active) == (7_615_616_512, 7_615_616_512 - idle)
    assert found.heads_total == 2 * idle
    assert found.routers == 28 * 14 * 3_584
    assert found.floor == found.dense_total - found.heads_total


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_the_meta_model_counts_as_the_real_model_and_its_parts_add_up(kind, tied):
    config = published(kind, 100, 32, 48, 3, 4, 2, tied=tied)
    config.head_dim = 16
    assert all(parameter.is_meta for parameter in meta_model(config).parameters())
    real = AutoModelForCausalLM.from_config(config)
    stored_once = {p.data_ptr(): p.numel() for p in real.parameters()}
    found = counts(config, experts=16, active_experts=16)
    assert found.dense_total == found.active == sum(stored_once.values())
    ffn = sum(p.numel() for name, p in real.named_parameters() if ".mlp." in name)
    assert found.ffn_total == ffn
    ends = found.input_embedding + found.output_head
    assert found.attention_and_norms + ends + ffn == found.dense_total
    assert found.output_head == 0 or not tied
    assert found.active - found.active_without_embeddings == ends
