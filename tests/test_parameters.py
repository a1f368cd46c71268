"""Parameter counts. Oracles: the paper's table, published sizes, models in memory."""

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from document_tables.paper_models import paper_models
from dotmoe.export.parameters import count_parameters
from dotmoe.method.config import ExpertsConfig
from dotmoe.method.granularity import resolve, splits_of
from dotmoe.models.family import family_of
from dotmoe.models.meta_model import meta_model
from dotmoe.run.config import recipe

MODELS = paper_models()
TINY = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def counts(config, **settings):
    granularity = resolve(ExpertsConfig(**settings), config.intermediate_size)
    return count_parameters(meta_model(config), family_of(config), (granularity,))


@pytest.mark.parametrize(
    ("model", "settings", "total", "active"),
    [
        ("LLaMA-3-8B", {"active_experts": 28}, 8_030_261_248, 3_802_402_816),
        ("Qwen2.5-7B", {"active_experts": 37}, 7_615_616_512, 3_338_212_864),
        ("Qwen2.5-7B", {"active_experts": 74}, 7_615_616_512, 4_764_014_080),
        ("LLaMA-2-7B", {"active_experts": 22}, 6_738_415_616, 3_517_190_144),
        ("LLaMA-2-7B", {"expert_size": 64, "active_experts": 43}, 6_738_415_616, 3_492_024_320),
    ],
)
def test_active_parameters_are_the_papers_to_the_digit(model, settings, total, active):
    counted = counts(MODELS[model], **settings)
    assert (counted.dense_total, counted.active) == (total, active)


def test_the_papers_attention_setting_is_a_recipe_and_its_counts_are_exact():
    (split,) = splits_of(recipe("qwen25_7b_attention").experts, 18_944, 28)
    assert (split.num_experts, split.expert_size, split.active_experts) == (14, 2, 7)
    config = MODELS["Qwen2.5-7B"]
    found = count_parameters(meta_model(config), family_of(config), (split,))
    idle = 28 * 14 * (128 * 3_584 * 2 + 128)  # layers, idle heads, W_Q, W_O and the bias of W_Q
    assert (found.dense_total, found.active) == (7_615_616_512, 7_615_616_512 - idle)
    assert found.heads_total == 2 * idle
    assert found.routers == 28 * 14 * 3_584
    assert found.floor == found.dense_total - found.heads_total


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_the_meta_model_counts_as_the_real_model_and_its_parts_add_up(kind, tied):
    config = kind(**TINY, tie_word_embeddings=tied)
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
