"""What cannot be converted, and why. Oracles: the stock config and the stock model of each type."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from dotmoe.errors import UserError
from dotmoe.load import LoadConfig, load_dense
from dotmoe.models import refusals
from dotmoe.models.family import FAMILIES, family_of
from dotmoe.models.refusals import REASONS

NO_STOCK_CLASS = {"deepseek"}
"""Types that only checkpoints with code of their own have."""
SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), 96),
    **{"vocab_size": 264, "num_key_value_heads": 4, "head_dim": 16},
}
STATED = [(reason, name) for reason, names in REASONS.items() for name in names]


def types_of(*reasons):
    return [name for reason, name in STATED if reason in reasons and name not in NO_STOCK_CLASS]


def text_config(model_type):
    return AutoConfig.for_model(model_type).get_text_config()


def modules_of(model_type):
    """Names and modules of the stock model, without storage."""
    plain = AutoConfig.for_model(model_type).to_dict()
    config = AutoConfig.for_model(model_type, **{k: v for k, v in SIZES.items() if k in plain})
    with torch.device("meta"):
        return dict(AutoModelForCausalLM.from_config(config).named_modules())


def refusal_of(config):
    with pytest.raises(UserError) as caught:
        family_of(config)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("reason", "model_type"), STATED)
def test_a_known_type_is_refused_with_value_reason_and_remedy(reason, model_type):
    message = refusal_of(SimpleNamespace(model_type=model_type))
    assert message.startswith(
        f"model_type is {model_type!r}, which dotmoe cannot convert: {reason}"
    )
    assert message.endswith(f"Families: {', '.join(FAMILIES)}.")


def test_no_type_is_refused_for_two_reasons_or_is_a_family():
    names = [name for _, name in STATED]
    assert len(names) == len(set(names))
    assert not set(names) & set(FAMILIES)
    assert {name for name in names if name not in CONFIG_MAPPING} == NO_STOCK_CLASS


@pytest.mark.parametrize("model_type", types_of(refusals._MOE))
def test_mixtures_of_experts_have_experts(model_type):
    config = text_config(model_type)
    config = getattr(config, "ffn_config", config)
    assert any("expert" in key for key in config.to_dict())


@pytest.mark.parametrize("model_type", types_of(refusals._GELU, refusals._SANDWICH))
def test_gelu_gates_are_gelu(model_type):
    config = text_config(model_type)
    assert "gelu" in (getattr(config, "hidden_activation", None) or config.hidden_act)


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
def test_sandwiches_have_norms_on_both_sides(model_type):
    layer = modules_of(model_type)["model.layers.0"]
    for place in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        assert hasattr(layer, f"{place}_layernorm")


@pytest.mark.parametrize("model_type", types_of(refusals._NO_GATE))
def test_ffns_said_to_have_no_gate_have_two_projections(model_type):
    modules = modules_of(model_type)
    projections = [
        name
        for name, module in modules.items()
        if isinstance(module, nn.Linear | Conv1D) and ".0." in name and "att" not in name
    ]
    assert len(projections) == 2, projections


@pytest.mark.parametrize("model_type", types_of(refusals._LAYER_NORM))
def test_layer_norms_are_no_rms_norms(model_type):
    norms = {
        type(m).__name__ for m in modules_of(model_type).values() if "Norm" in type(m).__name__
    }
    assert norms
    assert all("LayerNorm" in name for name in norms)


@pytest.mark.parametrize("model_type", types_of(refusals._PARTIAL))
def test_partial_rotation_is_partial(model_type):
    assert text_config(model_type).rope_parameters["partial_rotary_factor"] < 1


@pytest.mark.parametrize("model_type", types_of(refusals._LATENT))
def test_latent_attention_has_a_rank(model_type):
    assert text_config(model_type).kv_lora_rank > 0


@pytest.mark.parametrize("model_type", types_of(refusals._RECURRENT))
def test_recurrent_models_have_layers_with_a_state(model_type):
    config = text_config(model_type)
    if model_type == "lfm2":
        config.layer_types[0] = "conv"  # as in every checkpoint; the plain config has none
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = {name for name, _ in model.named_parameters()}
    assert any("conv" in name or "time_decay" in name for name in names)


def test_granite_4_keeps_its_ffns_beside_experts_and_recurrent_layers():
    config = text_config("granitemoehybrid")
    assert min(config.shared_intermediate_size, config.mamba_n_heads) > 0
    assert hasattr(config, "num_local_experts")


def test_smollm3_has_layers_without_rotary_embedding_and_bitnet_squares():
    assert 0 in text_config("smollm3").no_rope_layers
    assert text_config("bitnet").hidden_act == "relu2"


@pytest.mark.parametrize("model_type", types_of(refusals._WRAPPER))
def test_wrappers_hold_a_text_config(model_type):
    config = AutoConfig.for_model(model_type)
    assert config.get_text_config() is not config or hasattr(config, "audio_config")


@pytest.mark.parametrize(
    "keys",
    [{"num_local_experts": 8}, {"num_experts": 64}, {"n_routed_experts": 256}],
    ids=lambda keys: next(iter(keys)),
)
def test_experts_in_a_config_are_a_mixture_whatever_its_type(keys):
    assert refusals._MOE in refusal_of(SimpleNamespace(model_type="new", **keys))
    ((key, count),) = keys.items()
    message = refusal_of(AutoConfig.for_model("llama", **keys))
    assert message.startswith(f"{key} is {count} in this llama config, but only a dense model")
    assert message.endswith("Choose a dense one.")


def test_a_type_of_unknown_name_is_judged_by_its_config():
    assert refusals._MOE in refusal_of(SimpleNamespace(model_type="new_moe"))
    wrapper = SimpleNamespace(model_type="new_vl", text_config={})
    assert refusals._WRAPPER in refusal_of(wrapper)
    assert refusal_of(SimpleNamespace(model_type="new")).endswith(f"{', '.join(FAMILIES)}.")


def test_one_expert_or_none_is_a_dense_model():
    for count in (None, 0, 1):
        assert family_of(AutoConfig.for_model("granite", num_local_experts=count))


@pytest.mark.parametrize(("slip", "meant"), [("lama", "llama"), ("qwen-3", "qwen3")])
def test_a_slip_of_the_pen_is_corrected(slip, meant):
    assert refusal_of(SimpleNamespace(model_type=slip)).endswith(f"Did you mean {meant}?")


def test_another_real_type_is_no_slip_of_the_pen():
    assert "Did you mean" not in refusal_of(SimpleNamespace(model_type="olmo3"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("hidden_act", "relu", "Choose a SwiGLU model."),
        ("mlp_bias", True, "Choose a model without"),
    ],
)
def test_every_family_refuses_other_gates_and_biases_inside_experts(family, key, value, remedy):
    message = refusal_of(AutoConfig.for_model(family, **{key: value}))
    assert message.startswith(f"{key} is {'true' if value is True else repr(value)} in")
    assert f"this {family} config" in message
    assert remedy in message


LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    ("changes", "expected", "remedy"),
    [
        ({"rope_scaling": {"type": "longrope", **LONG}}, "'longrope'", "with the short context."),
        ({"partial_rotary_factor": 0.75}, "partial_rotary_factor is 0.75", "a model without it."),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "is no valid phi3 config",
            "original checkpoint's.",
        ),
    ],
    ids=["longrope", "partial", "linear"],
)
def test_phi3_says_which_rotary_embedding_it_cannot_take(
    changes, expected, remedy, tiny_dense, tmp_path
):
    folder = shutil.copytree(tiny_dense("phi3"), tmp_path / "phi3")
    (folder / "model.safetensors").unlink()  # judged before any weight is read
    path = folder / "config.json"
    config = {k: v for k, v in json.loads(path.read_text()).items() if k != "rope_parameters"}
    path.write_text(json.dumps(config | {"original_max_position_embeddings": 64} | changes))
    with pytest.raises(UserError) as caught:
        load_dense(str(folder), LoadConfig(device="cpu"))
    assert expected in str(caught.value)
    assert str(caught.value).endswith(remedy)
