"""Experts all at once on a CPU. Oracle: Transformers' eager implementation."""

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

from dotmoe.models import experts_on_cpu
from dotmoe.models.experts_on_cpu import use_all_at_once, use_stock
from dotmoe.models.load import load_weights

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
KINDS = {
    Glm4MoeConfig: {"n_routed_experts": 8, "first_k_dense_replace": 1},
    MixtralConfig: {"num_local_experts": 8},
    Qwen3MoeConfig: {"num_experts": 8, "norm_topk_prob": True},
    GraniteMoeConfig: {"num_local_experts": 8},
    GptOssConfig: {"num_local_experts": 8},
}
"""Architectures with eight experts; the last one's have biases and other weights."""


@pytest.fixture(params=KINDS, ids=lambda kind: kind.model_type)
def make(request):
    """Makes a model of an architecture with this k."""

    def make(active):
        torch.manual_seed(0)
        config = request.param(**SIZES, **KINDS[request.param], num_experts_per_tok=active)
        model = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        return model

    return make


@pytest.fixture(name="tokens_BT")
def tokens():
    return torch.arange(90).view(3, 30)


@torch.no_grad()
def logits_of(model, tokens_BT, implementation=None):
    if implementation is not None:
        model = copy.deepcopy(model)
        model.set_experts_implementation(implementation)
    return model(input_ids=tokens_BT).logits


@pytest.mark.parametrize("at_once", [1, 1 << 25])
@pytest.mark.parametrize("active", [1, 3, 4, 8])
def test_logits_are_those_of_transformers(active, at_once, make, tokens_BT, monkeypatch):
    monkeypatch.setattr(experts_on_cpu, "_MOST_VALUES", at_once)
    model = make(active)
    expected = logits_of(model, tokens_BT, "eager")
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    use_all_at_once(model)
    for _ in range(2):  # the first call has changed the order in memory
        found = logits_of(model, tokens_BT)
        assert (found - expected).norm() < 1e-5 * expected.norm()
    assert all(torch.equal(weights[name], each) for name, each in model.state_dict().items())
    use_stock(model)
    assert torch.equal(logits_of(model, tokens_BT), logits_of(model, tokens_BT, "grouped_mm"))


def test_many_experts_are_computed_at_once_and_few_as_transformers_does(tokens_BT, monkeypatch):
    seen = []
    own = experts_on_cpu._all_experts
    monkeypatch.setattr(experts_on_cpu, "_all_experts", lambda *a: (seen.append(1), own(*a))[1])
    for active, calls in ((3, 0), (4, 2)):
        config = MixtralConfig(**SIZES, num_local_experts=8, num_experts_per_tok=active)
        model = AutoModelForCausalLM.from_config(config).eval()
        use_all_at_once(model)
        logits_of(model, tokens_BT)
        assert len(seen) == calls


def test_an_export_that_is_measured_uses_it_and_a_dense_model_has_nothing_to_use(
    finished, tiny_dense
):
    model = load_weights(finished.folder / "5_export", "auto")
    assert model.config._experts_implementation == "dotmoe_all_at_once"
    dense = load_weights(tiny_dense("llama"), "auto")
    assert getattr(dense.config, "_experts_implementation", None) != "dotmoe_all_at_once"
