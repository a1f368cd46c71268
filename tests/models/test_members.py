"""Every family against its stock model, and what cannot be converted.

Oracles: Transformers' module and config of each type, its weights, and loops.
"""

import re
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from dotmoe.export.config import ExportConfig
from dotmoe.export.format import layer_names
from dotmoe.export.write import export
from dotmoe.method.masked import masked_by
from dotmoe.models.checkpoint import EMBEDDING, HEAD, NORM, Tensors
from dotmoe.models.family import FAMILIES, MOE, family_of
from dotmoe.models.hf_config import readout_of
from dotmoe.models.load import describe_dense
from dotmoe.models.targets import TARGETS
from export.comparison import logits_of
from runs import GRANITE_FACTORS, refusal

WIDE_HEADS = {"head_dim": 24, "num_key_value_heads": 1}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 16}
HALF = ["full_attention", "sliding_attention"]
SLIDING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
SOFT_CAPS = SLIDING | {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0}
"""Caps so low that logits and attention feel them."""
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "position_embedding_type": None}
MEMBERS = {
    "llama": [{}, {"tied": True}, {"attention_bias": True}, WIDE_HEADS],
    "mistral": [
        {"sliding_window": None},
        {"sliding_window": 16, "attention_bias": True, **WIDE_HEADS},
    ],
    "qwen2": [
        {"tied": True},
        {**QWEN_WINDOW, "max_window_layers": 1},
        {**QWEN_WINDOW, "max_window_layers": 2},
    ],
    "qwen3": [{"tied": True, **WIDE_HEADS}, {"attention_bias": True, "head_dim": 16}],
    "granite": [GRANITE_FACTORS, {**GRANITE_FACTORS, "tied": True, "attention_bias": True}],
    "olmo2": [{}, {"attention_bias": True}, {"tied": True, "num_key_value_heads": 4}],
    "phi3": [
        {},
        {"tied": True, "num_key_value_heads": 1},
        {"sliding_window": 16},
        {"partial_rotary_factor": 0.5},
    ],
    "internlm3": [{}],
    "iquestcoder": [WIDE_HEADS],
    "seed_oss": [{}, {"attention_out_bias": True}, {"attention_bias": False}],
    "ministral": [{**WIDE_HEADS, "sliding_window": 16, "layer_types": HALF}],
    "smollm3": [SLIDING | {"no_rope_layers": [1, 0], "use_sliding_window": True}, {"tied": True}],
    "olmo3": [SLIDING],
    "exaone4": [SLIDING],
    "glm4": [{"attention_bias": True, "head_dim": 16}],
    "gemma": [{"tied": True, **WIDE_HEADS}],
    "gemma2": [SOFT_CAPS | {"tied": True, **WIDE_HEADS}],
    "gemma3_text": [SLIDING | {"tied": True, "final_logit_softcapping": 2.0, **WIDE_HEADS}],
    "cohere2": [SLIDING | {"logit_scale": 0.25, "tied": True}],
    "hunyuan_v1_dense": [{"attention_bias": True}, {"tied": True, **WIDE_HEADS}],
    "ministral3": [{}],
    "qwen3_5_text": [{"tied": True}],
    "ernie4_5": [{"tied": True, **WIDE_HEADS}],
    "granitemoehybrid": [GRANITE_FACTORS, {"tied": True, "attention_bias": True}, HYBRID],
    "lfm2": [{"tied": True}, {"block_auto_adjust_ff_dim": False, "intermediate_size": 96}],
    "cwm": [{"sliding_window": 16, "layer_types": HALF}, {"sliding_window": 16}],
}
"""Configs of each family, which between them have every feature that it can have."""
CASES = [(family, config) for family, configs in MEMBERS.items() for config in configs]
ROPES = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 32,
    },
}


def longrope_of(frequencies):
    factors = {"short_factor": [1.5] * frequencies, "long_factor": [4.0] * frequencies}
    return factors | {"original_max_position_embeddings": 32}


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join([case[0], *case[1]]))
def dense(request, dense_of):
    """The model of each case."""
    family, config = request.param
    return dense_of(family, **config)


def test_a_family_cannot_be_registered_without_being_in_this_suite():
    assert set(MEMBERS) == set(FAMILIES)


def test_traits_are_those_of_the_stock_module(dense):
    traits = dense.traits
    for layer in dense.model.model.layers:
        if getattr(layer, "self_attn", None) is None:
            continue
        attention, names = layer.self_attn, set(layer.state_dict())
        biases = {name.split(".")[1][0] for name in names if name.endswith("_proj.bias")}
        assert biases == set("qkv" * traits.qkv_bias + "o" * traits.output_bias)
        assert attention.head_dim == traits.head_dim
        heads = {"none": None, "head": 1, "full": dense.config.num_attention_heads}[traits.qk_norm]
        if heads is None:
            assert not hasattr(attention, "q_norm")
        else:
            assert attention.q_norm.weight.shape == (heads * traits.head_dim,)
        norms = {name for name in names if name.endswith("layernorm.weight")}
        places = ("input", "post_attention", "post_feedforward")[traits.norms_after :][:2]
        factors = traits.multipliers
        if traits.has_own_decoder:
            after = {"post_feedforward_layernorm.weight", "post_mlp_layernorm.weight"}
            assert traits.norms_after == bool(norms & after)
            continue
        assert norms == {f"{place}_layernorm.weight" for place in places}
        assert attention.scaling == (factors.attention or traits.head_dim**-0.5)
        assert getattr(layer, "residual_multiplier", 1.0) == factors.residual
    assert getattr(dense.model.model, "embedding_multiplier", 1.0) == factors.embedding


def test_the_parts_compute_what_the_stock_model_does(dense, tokens_BT):
    hidden = dense.model.model(input_ids=tokens_BT).last_hidden_state
    product, expected = dense.model.lm_head(hidden), logits_of(dense.model, tokens_BT)
    torch.testing.assert_close(readout_of(dense.config).logits(product), expected)
    for layer in dense.family.layers(dense.model):
        ffn, x = dense.family.ffn(layer), torch.randn(5, 3, dense.widths.model)
        output = ffn.down(ffn.hidden(x))
        torch.testing.assert_close(output, dense.family.block(layer, TARGETS["ffn"])(x))
        if dense.traits.norms_after:
            norm = layer.get_submodule(dense.family.ffn_norm_after)
            expected = F.rms_norm(x, x.shape[-1:], eps=1e-6) * dense.family.gain(norm)
            torch.testing.assert_close(norm(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "config", "window"),
    [
        ("mistral", {"sliding_window": 16}, 16),
        ("phi3", {"sliding_window": 16, "layer_types": ["full_attention"] * 2}, 16),
        ("qwen2", {**QWEN_WINDOW, "max_window_layers": 0}, 16),
        ("qwen3", {**QWEN_WINDOW, "max_window_layers": 1}, 16),
        ("qwen2", {**QWEN_WINDOW, "max_window_layers": 2}, None),
        ("qwen3", {**QWEN_WINDOW, "use_sliding_window": False}, None),
    ],
)
def test_up_to_the_stated_window_attention_is_full(family, config, window, dense_of, tokens_BT):
    dense = dense_of(family, **config)
    assert dense.traits.sliding_window == window
    full = AutoModelForCausalLM.from_pretrained(dense.folder)
    full.config.sliding_window = None if family in ("mistral", "phi3") else 4096
    expected, logits = logits_of(full, tokens_BT), logits_of(dense.model, tokens_BT)
    torch.testing.assert_close(logits[:, :window], expected[:, :window])
    if window is not None:
        assert (logits[:, window] - expected[:, window]).abs().amax() > 1e-3


def test_the_names_in_llamas_form_reach_every_stored_row_once(dense):
    stored = load_file(dense.folder / "model.safetensors")
    tensors = Tensors.of(dense)
    names = [EMBEDDING, NORM] + [HEAD] * (not dense.config.tie_word_embeddings)
    for layer in range(dense.widths.layers):
        names += layer_names(dense, layer)
    reached = {name: torch.zeros(len(tensor)) for name, tensor in stored.items()}
    for name in names:
        part = dense.family.stored(dense.config, name)
        rows = slice(*part.rows) if part.rows else slice(None)
        key = tensors.stored_name(name)
        reached[key][rows] += 1
        assert tensors.describe(name) == (stored[key][rows].shape, stored[key].dtype)
        assert torch.equal(tensors.read(name), stored[key][rows])
    assert all(bool((rows == 1).all()) for rows in reached.values())


@pytest.mark.parametrize(
    ("family", "rope", "share"),
    [
        *(("llama", rope, 1.0) for rope in (*ROPES, "longrope")),
        ("qwen2", "yarn", 1.0),
        ("granite", "llama3", 1.0),
        ("phi3", "longrope", 1.0),
        *(("phi3", rope, 0.5) for rope in ("default", "longrope")),
    ],
)
def test_rotary_embeddings_survive_the_export(family, rope, share, dense_of, layout_of, tmp_path):
    """Phi-3.5 has longrope; Phi-4-mini longrope and heads of which a share of 3/4 is rotated."""
    values = ROPES | {"default": {}, "longrope": longrope_of(int(16 * share) // 2)}
    settings = {"rope_parameters": {"rope_type": rope, "rope_theta": 5e4, **values[rope]}}
    if share != 1:
        settings["rope_parameters"]["partial_rotary_factor"] = share
    dense = dense_of(family, **MEMBERS[family][0], **settings, max_position_embeddings=128)
    assert family_of(dense.config) is dense.family
    layout = layout_of(dense)
    text_BT = torch.randint(2, 258, (4, 96), generator=torch.Generator().manual_seed(4))
    export(dense, (layout,), tmp_path / "out", ExportConfig(), text_BT)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    # Within the context, up to the length where longrope changes, and past the context, where
    # dynamic scaling begins.
    for tokens_BT in (text_BT, text_BT[:, :32], text_BT.view(2, 192)):
        with masked_by(dense, layout):
            expected = logits_of(dense.model, tokens_BT)
        error = (logits_of(exported, tokens_BT) - expected).abs().mean(dim=-1) / expected.std()
        assert float(error.median()) < 1e-3


# --- refusals

REFUSED = [
    *product(
        sorted(FAMILIES.keys() - {"lfm2"}),  # has SiLU whatever its config says
        [{"hidden_act": "relu", "hidden_activation": "relu"}],
        ["hidden_act is 'relu'.*SwiGLU"],
    ),
    *product(FAMILIES, [{"mlp_bias": True, "attention_bias": True}], ["mlp_bias is true.*without"]),
    *(
        ("llama", {key: 8}, f"{key} is 8: {MOE}. Choose a dense one.$")
        for key in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    ),
]


def test_biases_of_ffns_are_refused_whatever_the_config_calls_them(tiny_dense):
    model = tiny_dense("ernie4_5", use_bias=True)
    line = refusal(describe_dense, str(model))
    assert re.search(r"config.json gives FFNs a bias \(gate_proj.bias\).*without it", line)


@pytest.mark.parametrize(("family", "changes", "words"), REFUSED, ids=str)
def test_a_config_that_cannot_be_converted_exactly_is_refused(family, changes, words):
    message = refusal(family_of, AutoConfig.for_model(family, **{"num_local_experts": 0} | changes))
    assert re.match(f"In this {family} config {words}", message)


def test_a_type_of_unknown_name_is_judged_by_its_config_and_slips_are_corrected():
    assert MOE in refusal(family_of, SimpleNamespace(model_type="new_moe"))
    assert MOE in refusal(family_of, SimpleNamespace(model_type="new", num_experts=8))
    for count in (None, 0, 1):
        assert family_of(AutoConfig.for_model("granite", num_local_experts=count))
    wrapper = SimpleNamespace(model_type="new_vl", text_config={"model_type": "arcee"})
    inner = "it wraps a language model of type 'arcee', and its layers have no gated FFN"
    assert inner in refusal(family_of, wrapper)
    assert refusal(family_of, SimpleNamespace(model_type="qwen-3")).endswith("Did you mean qwen3?")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("arcee", "its layers have no gated FFN"),
        ("minicpm3", r"its layers have self_attn.q_a_proj \(6 such parts\), unknown to dotmoe"),
        ("cohere", "its layers have the usual parts, but what they compute was not checked"),
        ("whisper_encoder", "Transformers .* makes no causal language model of it"),
        ("deepseek_v3", MOE),
    ],
)
def test_a_family_that_is_not_known_is_refused_with_what_is_missing(kind, words):
    """Oracle: the stock classes, as their modeling files have them."""
    plain = AutoConfig.for_model(kind).to_dict() if kind in CONFIG_MAPPING else {}
    message = refusal(family_of, SimpleNamespace(**plain | {"model_type": kind}))
    assert re.match(f"model_type is {kind!r}, which dotmoe cannot convert: {words}. Fam", message)
