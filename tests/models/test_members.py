"""Every family against its stock model. Oracles: Transformers' module, its weights, and loops."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from dotmoe.checkpoint.tensors import EMBEDDING, HEAD, NORM, Tensors
from dotmoe.export import ExportConfig, export
from dotmoe.export.tensors import PROJECTIONS, carried_names
from dotmoe.layout import ExpertLayout
from dotmoe.load import LoadConfig, load_dense
from dotmoe.models.family import FAMILIES, family_of
from dotmoe.moe.masked import masked_by

E, K = 12, 3
WIDE_HEADS = {"head_dim": 24, "num_key_value_heads": 1}
FACTORS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 16}
MEMBERS = {
    "llama": [{}, {"tied": True}, {"attention_bias": True}, WIDE_HEADS],
    "mistral": [{"sliding_window": None}, {"sliding_window": 16, **WIDE_HEADS}],
    "qwen2": [
        {"tied": True},
        {**QWEN_WINDOW, "max_window_layers": 1},
        {**QWEN_WINDOW, "max_window_layers": 2},
    ],
    "qwen3": [{"tied": True, **WIDE_HEADS}, {"attention_bias": True, "head_dim": 16}],
    "granite": [FACTORS, {**FACTORS, "tied": True, "attention_bias": True}],
    "olmo2": [{}, {"attention_bias": True}, {"tied": True, "num_key_value_heads": 4}],
    "phi3": [{}, {"tied": True, "num_key_value_heads": 1}, {"sliding_window": 16}],
}
"""Configs of each family, which between them have every feature that it can have."""
KEYS_OF_PHI3 = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "sliding_window"),
    *("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings"),
    *("tie_word_embeddings", "rope_parameters"),
)
CASES = [(family, config) for family in FAMILIES for config in MEMBERS.get(family, [])]
PLAIN = [(family, MEMBERS[family][0]) for family in FAMILIES if family in MEMBERS]
ROPES = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


def name_of(case):
    family, config = case
    return "-".join([family, *config])


every_case = pytest.mark.parametrize("case", CASES, ids=name_of)
every_family = pytest.mark.parametrize("case", PLAIN, ids=name_of)


@pytest.fixture
def load(tiny_dense):
    """Loads the model of a case."""

    def load_case(case, **more):
        family, config = case
        return load_dense(str(tiny_dense(family, **config, **more)), LoadConfig(device="cpu"))

    return load_case


@pytest.fixture(name="tokens_BT")
def random_tokens():
    return torch.randint(2, 258, (2, 48), generator=torch.Generator().manual_seed(2))


def layout_for(dense, active_experts=K):
    widths, generator = dense.widths, torch.Generator().manual_seed(5)
    experts = torch.arange(E).repeat_interleave(widths.ffn // E)
    router = torch.randn(widths.layers, E, widths.model, generator=generator)
    return ExpertLayout(
        expert_of_neuron_LN=torch.stack(
            [experts[torch.randperm(widths.ffn, generator=generator)] for _ in range(widths.layers)]
        ),
        router_LED=router * 1.5 / widths.model**0.5,
        active_experts=active_experts,
    )


def ffn_weights(layer):
    """Gate, up and down of a stock layer, taken without the family."""
    weights = layer.mlp.state_dict()
    if "gate_up_proj.weight" in weights:
        gate, up = weights["gate_up_proj.weight"].chunk(2)
    else:
        gate, up = weights["gate_proj.weight"], weights["up_proj.weight"]
    return gate, up, weights["down_proj.weight"]


def logits_of(model, tokens_BT):
    with torch.no_grad():
        return model(input_ids=tokens_BT).logits


def test_a_family_cannot_be_registered_without_being_in_this_suite():
    assert set(MEMBERS) == set(FAMILIES)
    assert all(family.model_type == name for name, family in FAMILIES.items())


@every_case
def test_traits_are_those_of_the_stock_module(case, load):
    dense = load(case)
    traits = dense.family.traits(dense.config)
    for layer in dense.model.model.layers:
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
        assert norms == {f"{place}_layernorm.weight" for place in places}
        factors = traits.multipliers
        assert attention.scaling == (factors.attention or traits.head_dim**-0.5)
        assert getattr(layer, "residual_multiplier", 1.0) == factors.residual
    assert getattr(dense.model.model, "embedding_multiplier", 1.0) == factors.embedding


@every_case
def test_trunk_head_and_divisor_give_the_logits(case, load, tokens_BT):
    dense = load(case)
    hidden = dense.family.trunk(dense.model)(input_ids=tokens_BT).last_hidden_state
    divisor = dense.family.traits(dense.config).multipliers.logits_divisor
    logits = dense.family.head(dense.model)(hidden) / divisor
    torch.testing.assert_close(logits, logits_of(dense.model, tokens_BT))


def test_a_usual_attention_factor_of_granite_is_none(tiny_dense):
    folder = tiny_dense("granite", attention_multiplier=0.25, num_attention_heads=4)
    dense = load_dense(str(folder), LoadConfig(device="cpu"))  # heads of 16: 16**-0.5
    assert dense.family.traits(dense.config).multipliers.attention is None


@pytest.mark.parametrize(
    ("family", "config", "window"),
    [
        ("mistral", {"sliding_window": 16}, 16),
        ("phi3", {"sliding_window": 16}, 16),
        ("qwen2", {**QWEN_WINDOW, "max_window_layers": 0}, 16),
        ("qwen3", {**QWEN_WINDOW, "max_window_layers": 1}, 16),
        ("qwen2", {**QWEN_WINDOW, "max_window_layers": 2}, None),
        ("qwen3", {**QWEN_WINDOW, "use_sliding_window": False}, None),
    ],
)
def test_up_to_the_stated_window_attention_is_full(family, config, window, load, tokens_BT):
    dense = load((family, config))
    assert dense.family.traits(dense.config).sliding_window == window
    full = AutoModelForCausalLM.from_pretrained(dense.folder)
    full.config.sliding_window = None if family in ("mistral", "phi3") else 4096
    expected, found = logits_of(full, tokens_BT), logits_of(dense.model, tokens_BT)
    same = slice(window)
    torch.testing.assert_close(found[:, same], expected[:, same])
    if window is not None:
        assert (found[:, window] - expected[:, window]).abs().amax() > 1e-3


@pytest.mark.parametrize("family", ["mistral", "phi3"])
def test_the_window_is_on_every_layer(family, load, tokens_BT):
    dense = load((family, {"sliding_window": 16}))
    other_BT = tokens_BT.clone()
    other_BT[:, 0] = 260
    reach = dense.widths.layers * (16 - 1)
    change = logits_of(dense.model, other_BT) - logits_of(dense.model, tokens_BT)
    assert change[:, reach + 1 :].abs().amax() == 0
    assert change[:, reach].abs().amax() > 0


@every_case
def test_the_names_in_llamas_form_reach_every_stored_row_once(case, load):
    dense = load(case)
    stored = load_file(dense.folder / "model.safetensors")
    tensors = Tensors.of(dense)
    names = [EMBEDDING, NORM] + [HEAD] * (not dense.config.tie_word_embeddings)
    for layer in range(dense.widths.layers):
        names += carried_names(dense, layer)
        names += [dense.family.ffn_tensor(layer, projection) for projection in PROJECTIONS]
    reached = {name: torch.zeros(len(tensor)) for name, tensor in stored.items()}
    for name in names:
        part = dense.family.stored(dense.config, name)
        rows = slice(*part.rows) if part.rows else slice(None)
        key = tensors.stored_name(name)
        reached[key][rows] += 1
        assert tensors.describe(name) == (stored[key][rows].shape, stored[key].dtype)
        assert torch.equal(tensors.read(name), stored[key][rows])
    assert all(bool((rows == 1).all()) for rows in reached.values())


@every_case
def test_a_family_answers_to_its_own_names_too(case, load):
    dense = load(case)
    tensors = Tensors.of(dense)
    for name, parameter in dense.model.named_parameters():
        assert torch.equal(tensors.read(name), parameter)


@pytest.mark.parametrize("config", MEMBERS["phi3"], ids=str)
def test_phi3_in_llamas_form_is_the_same_model(config, load, tokens_BT):
    fused = load(("phi3", config))
    assert type(fused.model).__module__ == "transformers.models.phi3.modeling_phi3"
    tensors, sizes = Tensors.of(fused), fused.config.to_dict()
    stock = MistralForCausalLM(MistralConfig(**{key: sizes[key] for key in KEYS_OF_PHI3})).eval()
    stock.load_state_dict({name: tensors.read(name) for name in stock.state_dict()})
    split = replace(fused, model=stock, family=FAMILIES["mistral"])
    logits = []
    for dense in (fused, split):
        with masked_by(dense, layout_for(dense)):
            logits.append(logits_of(dense.model, tokens_BT))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


@every_case
def test_projections_make_the_ffn(case, load):
    dense = load(case)
    x = torch.randn(5, 3, dense.widths.model)
    for layer in dense.family.layers(dense.model):
        ffn = dense.family.ffn(layer)
        output = ffn.down(F.silu(ffn.gate(x)) * ffn.up(x))
        torch.testing.assert_close(output, layer.mlp(x))
        for projection, weight in zip(
            (ffn.gate, ffn.up, ffn.down), ffn_weights(layer), strict=True
        ):
            assert torch.equal(projection.weight, weight)


@every_case
def test_masked_layers_sum_the_chosen_experts_of_each_token(case, load, tokens_BT):
    dense = load(case)
    layout = layout_for(dense)
    seen = {}
    weights = [ffn_weights(layer) for layer in dense.model.model.layers]
    with masked_by(dense, layout):
        for index, layer in enumerate(dense.model.model.layers):
            layer.mlp.register_forward_hook(
                lambda module, args, output, index=index: seen.update({index: (args[0], output)})
            )
        logits_of(dense.model, tokens_BT[:1, :8])
    assert set(seen) == set(range(layout.num_layers))
    for index, (inputs, outputs) in seen.items():
        gate, up, down = weights[index]
        router_ED = layout.router_LED[index]
        for x, output in zip(inputs[0], outputs[0], strict=True):
            scores = [float(row @ x) for row in router_ED]
            expected = torch.zeros_like(output)
            for expert in sorted(range(E), key=scores.__getitem__)[-K:]:
                n = (layout.expert_of_neuron_LN[index] == expert).nonzero().flatten()
                expected += down[:, n] @ (F.silu(gate[n] @ x) * (up[n] @ x))
            torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)


def test_a_phi3_that_brings_its_own_code_loads_as_the_stock_one(tiny_dense, tmp_path):
    folder = shutil.copytree(tiny_dense("phi3"), tmp_path / "hub")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config))
    dense = load_dense(str(folder), LoadConfig(device="cpu"))
    assert type(dense.model).__module__ == "transformers.models.phi3.modeling_phi3"


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        ("llama", "linear"),
        ("llama", "dynamic"),
        ("llama", "yarn"),
        ("llama", "llama3"),
        ("mistral", "linear"),
        ("qwen2", "yarn"),
        ("qwen3", "yarn"),
        ("granite", "llama3"),
        ("olmo2", "dynamic"),
    ],
)
def test_scaled_rotary_embeddings_survive_the_export(family, rope, load, tmp_path):
    settings = {"rope_parameters": {"rope_type": rope, "rope_theta": 5e4, **ROPES[rope]}}
    dense = load((family, {**MEMBERS[family][0], **settings}), max_position_embeddings=128)
    assert family_of(dense.config) is dense.family
    layout = layout_for(dense)
    text_BT = torch.randint(2, 258, (4, 96), generator=torch.Generator().manual_seed(4))
    export(dense, layout, tmp_path / "out", ExportConfig(), text_BT)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    # Within the context, and past it, where dynamic scaling begins.
    for tokens_BT in (text_BT, text_BT.view(2, 192)):
        with masked_by(dense, layout):
            expected = logits_of(dense.model, tokens_BT)
        error = (logits_of(exported, tokens_BT) - expected).abs().mean(dim=-1) / expected.std()
        assert float(error.median()) < 1e-3
