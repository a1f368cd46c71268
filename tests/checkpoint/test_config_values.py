"""Values of a config.json that Transformers ignores, or that make its classes fail."""

import json
import re

import pytest

from dotmoe.measure.evaluate.models import model_folder
from dotmoe.models.load import describe_dense
from dotmoe.models.read_config import dense_config
from e2e.test_published_models import MODELS, UNREAD
from runs import put_into, refusal

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 2.0}


def scaling(**values):
    return {"rope_scaling": values}


def test_two_rotations_that_differ_are_refused(copied):
    put_into(copied / "config.json", rope_parameters=LINEAR, rope_scaling={**LINEAR, "factor": 4.0})
    words = "has factor 2.0 in rope_parameters, but 4.0 in rope_scaling"
    assert words in refusal(describe_dense, str(copied))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (scaling(type="mrope", mrope_section=[2, 3, 3]), "rope_type .* is 'mrope'.*set rope_type"),
        (scaling(type="ntk-aware", factor=2.0), "'ntk-aware'.*yarn"),
        (scaling(type="su", factor=2.0), "'su'.*yarn"),
        (scaling(type=3, factor=2.0), "rope_type .* is .3."),
        (scaling(rope_type="linear", factor="2.0"), r"rope_scaling\.factor .* is '2\.0'"),
        (scaling(rope_type="linear", factor=None), r"rope_scaling\.factor .* is None"),
        (scaling(rope_type="linear", factor=True), r"rope_scaling\.factor .* is True"),
        (scaling(rope_type="linear", factor=0), r"rope_scaling\.factor .* is 0"),
        (scaling(rope_type="linear", factor=[2.0]), r"rope_scaling\.factor .* is \[2\.0\]"),
        (scaling(rope_type="linear"), "factor"),
        (scaling(factor=2.0), "without a rope_type, so it has no effect"),
        (scaling(type="linear", rope_type="yarn", factor=2.0), "two types, linear and yarn"),
        (scaling(**LLAMA3 | {"low_freq_factor": 4.0}), "must be below"),
        (
            scaling(**{k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}),
            r"config \(Missing required keys .*'low_freq_factor'\}\)\. Compare",
        ),
        (scaling(**YARN, beta_fast="32"), r"beta_fast .* is '32'"),
        (scaling(**YARN, alpha_of_mine=1000), "alpha_of_mine .* does not read it"),
        (scaling(rope_type="longrope", short_factor="1", long_factor=[1.0]), "must list numbers"),
        ({"rope_scaling": "linear"}, "is 'linear', not an object"),
        ({"rope_scaling": [2.0]}, r"is \[2\.0\], not an object"),
        ({"rope_parameters": None, "rope_theta": "10000"}, "rope_theta .* is '10000'"),
        ({"rope_parameters": None, "rope_theta": None}, "rope_theta .* is None"),
        ({"rope_parameters": None, "rope_theta": -1.0}, r"rope_theta .* is -1\.0"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
            "rope_theta .* is None",
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "1"}}, "rope_theta .* is '1'"),
        (scaling(type=["linear"], factor=2.0), "linear"),
        (scaling(type="default", factor=4.0), r"factor .* is 4\.0, but rope_type default has no"),
        (
            scaling(
                rope_type="longrope",
                short_factor=[1.0],
                long_factor=[1.0] * 8,
                original_max_position_embeddings=32,
            ),
            "short_factor .* has 1 numbers, but a head has 8 rotated pairs",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_theta": 5e4},
            "has rope_theta 10000.0 in rope_parameters, but 50000.0",
        ),
        (
            {"rope_parameters": {"full_attention": LINEAR}},
            "is for kinds of layers .full_attention., and llama .* has one rotation",
        ),
        ({"max_position_embeddings": -1}, "max_position_embeddings .* is -1"),
        ({"text_config": "none"}, "no valid llama config"),
        ({"max_position_embeddings": None, "sliding_window": 64}, "config"),
        ({"logits_scaling": 3.0}, "logits_scaling .* is 3.0, but llama .* does not read it"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"query_pre_attn_scalar": 144}, "query_pre_attn_scalar"),
        ({"use_qk_norm": True}, "use_qk_norm"),
        ({"sliding_window": 64}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"layer_norm_eps": 1e-3}, "layer_norm_eps"),
    ],
)
def test_what_would_be_ignored_or_fail_is_refused_alike(values, words, copied):
    if "rope_scaling" in values:
        values = values | {"rope_parameters": None, "rope_theta": 1e4}
    put_into(copied / "config.json", **values)
    said = refusal(describe_dense, str(copied))  # of convert, compare and prune
    assert re.search(words, said), said
    assert refusal(model_folder, str(copied)) == said  # of evaluate and bench
    (copied / "model.safetensors").unlink()
    assert refusal(dense_config, str(copied)) == said  # of inspect


@pytest.mark.parametrize(
    "values",
    [
        scaling(type="mrope", rope_type="default", mrope_section=[2, 3, 3]),
        scaling(**YARN, attention_factor=None, beta_fast=None),
        scaling(**YARN, mscale=1.0, mscale_all_dim=0, truncate=False),
        scaling(**LLAMA3),
        {"rope_scaling": {}},
        {"rope_scaling": None, "sliding_window": 4096, "use_sliding_window": False},
        {"logits_scaling": 1.0, "final_logit_softcapping": None, "use_mrope": False},
        {"partial_rotary_factor": 1.0, "layer_types": ["full_attention"] * 2},
        {"pretraining_tp": 1, "auto_map": {"AutoConfig": "mine.C"}, "unsloth_fixed": True},
    ],
)
def test_harmless_values_are_read(values, copied):
    if values.get("rope_scaling"):
        values = values | {"rope_parameters": None, "rope_theta": 1e4}
    put_into(copied / "config.json", **values)
    assert describe_dense(str(copied)).widths.layers == 2


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {UNREAD}))
def test_published_configs_are_read(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]["config"]))
    dense_config(str(tmp_path))
