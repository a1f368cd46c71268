"""What cannot be converted, and why. Oracles: the stock config and the stock model of each type."""

import json
import shutil
from types import SimpleNamespace

import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from dotmoe.errors import UserError
from dotmoe.load import LoadConfig, load_dense
from dotmoe.models import refusals
from dotmoe.models.family import FAMILIES, family_of
from dotmoe.models.refusals import REASONS

STATED = [(reason, name) for reason, names in REASONS.items() for name in names]


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


def test_types_are_stock_types_no_family_and_have_one_reason():
    names = [name for _, name in STATED]
    assert len(names) == len(set(names))
    assert not set(names) & set(FAMILIES)
    assert set(names) <= set(CONFIG_MAPPING)


@pytest.mark.parametrize(
    "keys",
    [{"num_local_experts": 8}, {"num_experts": 64}, {"n_routed_experts": 256}],
    ids=lambda keys: next(iter(keys)),
)
def test_experts_in_a_config_are_a_mixture_whatever_its_type(keys):
    assert refusals.MOE in refusal_of(SimpleNamespace(model_type="new", **keys))
    ((key, count),) = keys.items()
    message = refusal_of(AutoConfig.for_model("llama", **keys))
    assert message.startswith(f"{key} is {count} in this llama config, but only a dense model")
    assert message.endswith("Choose a dense one.")


def test_a_type_of_unknown_name_is_judged_by_its_config():
    assert refusals.MOE in refusal_of(SimpleNamespace(model_type="new_moe"))
    wrapper = SimpleNamespace(model_type="new_vl", text_config={})
    assert refusals.WRAPPER in refusal_of(wrapper)
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
