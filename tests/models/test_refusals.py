"""What cannot be converted, and why. Oracles: the stock config of each type."""

from types import SimpleNamespace

import pytest
from transformers import AutoConfig

from dotmoe.errors import UserError
from dotmoe.models.family import FAMILIES, MOE, WRAPPER, family_of

LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def refusal_of(config):
    with pytest.raises(UserError) as caught:
        family_of(config)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("key", ["num_local_experts", "num_experts", "n_routed_experts"])
def test_experts_in_a_config_are_a_mixture_whatever_its_type(key):
    assert MOE in refusal_of(SimpleNamespace(model_type="new", **{key: 8}))
    message = refusal_of(AutoConfig.for_model("llama", **{key: 8}))
    assert message.startswith(f"In this llama config {key} is 8: ")
    assert message.endswith("Choose a dense one.")
    for count in (None, 0, 1):
        assert family_of(AutoConfig.for_model("granite", **{key: count}))


def test_a_type_of_unknown_name_is_judged_by_its_config_and_slips_are_corrected():
    assert MOE in refusal_of(SimpleNamespace(model_type="new_moe"))
    assert WRAPPER in refusal_of(SimpleNamespace(model_type="new_vl", text_config={}))
    assert refusal_of(SimpleNamespace(model_type="qwen-3")).endswith("Did you mean qwen3?")
    assert refusal_of(SimpleNamespace(model_type="olmo3")) == (
        f"model_type is 'olmo3', which dotmoe cannot convert. Families: {', '.join(FAMILIES)}."
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("hidden_act", "relu", "'relu'.*SwiGLU"), ("mlp_bias", True, "true.*without")],
)
def test_every_family_refuses_other_gates_and_biases_inside_experts(family, key, value, words):
    with pytest.raises(UserError, match=f"^In this {family} config {key} is {words}"):
        family_of(AutoConfig.for_model(family, **{key: value}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": {"type": "longrope", **LONG}}, "'longrope'.*with the short context"),
        ({"partial_rotary_factor": 0.75}, "partial_rotary_factor is 0.75.*a model without it"),
    ],
    ids=["longrope", "partial"],
)
def test_phi3_says_which_rotary_embedding_it_cannot_take(changes, words):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "original_max_position_embeddings": 64}
    with pytest.raises(UserError, match=words):
        family_of(AutoConfig.for_model("phi3", **sizes, **changes))
