"""Files run in llama.cpp itself, beside Transformers; skipped where it is not installed."""

from contextlib import contextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM

from dotmoe.errors import UserError, VerificationError
from dotmoe.evaluate.scoring import row_nats, stock_nats
from dotmoe.export import ExportConfig, export
from dotmoe.gguf_export import (
    GGUF_OUTPUTS,
    GgufConfig,
    LlamaCppModel,
    decoder,
    export_gguf,
    set_active_experts,
    write_dense_gguf,
)
from dotmoe.load import LoadConfig, load_dense
from dotmoe.moe.masked import masked_by

pytestmark = pytest.mark.usefixtures("llama_cpp")

FORMATS_OF = {
    "llama": ("gguf_llama", "gguf_glm4moe"),
    "mistral": ("gguf_llama", "gguf_glm4moe"),
    "qwen2": ("gguf_llama", "gguf_glm4moe"),
    "qwen3": ("gguf_glm4moe",),
    "phi3": ("gguf_llama", "gguf_glm4moe"),
}
CASES = [
    (family, name, tied)
    for family, names in FORMATS_OF.items()
    for name in names
    for tied in (False, True)
]
WIDE_HEADS = {"head_dim": 24, "num_key_value_heads": 1}


def rope(kind, **values):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **values}}


LLAMA3 = rope(
    "llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
LINEAR = rope("linear")
YARN = rope("yarn", original_max_position_embeddings=64)
ODD_YARN = rope("yarn", original_max_position_embeddings=64, beta_fast=16.0, attention_factor=1.3)


def logits_of(model, tokens_BT):
    with torch.no_grad():
        return model(input_ids=tokens_BT).logits


def by_llama_cpp(folder, tokens_BT):
    (file,) = folder.glob("*.gguf")
    with LlamaCppModel(file, context=tokens_BT.shape[1]) as model:
        return torch.stack([model.logits(row) for row in tokens_BT])


def median_error(actual, reference):
    # Of the median token: a near-tie that falls the other way changes all later tokens of its row.
    error = (actual - reference).abs().mean(dim=-1).flatten() / reference.std()
    return float(error.median())


@contextmanager
def softmax_gated(dense, layout, exponents):
    """The dense model with the gates that a softmax before the choice makes, in float32."""

    def gates(layer):
        def hook(module, arguments):
            x = arguments[0]
            logits = x @ layout.router_LED[layer].T * 2.0 ** -exponents[layer]
            shares = torch.softmax(logits, dim=-1)
            chosen = shares.topk(layout.active_experts, dim=-1)
            weights = chosen.values / chosen.values.sum(dim=-1, keepdim=True)
            by_expert = torch.zeros_like(shares).scatter(-1, chosen.indices, weights)
            by_neuron[layer] = by_expert[..., layout.expert_of_neuron_LN[layer]]

        return hook

    def scale(layer):
        def hook(module, arguments):
            return arguments[0] * by_neuron[layer] * layout.active_experts

        return hook

    by_neuron, hooks = {}, []
    for index, layer in enumerate(dense.model.model.layers):
        hooks.append(layer.mlp.register_forward_pre_hook(gates(index)))
        hooks.append(layer.mlp.down_proj.register_forward_pre_hook(scale(index)))
    yield
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(("family", "name", "tied"), CASES)
def test_every_family_runs_as_the_masked_dense_model(
    family, name, tied, dense_of, layout_of, tokens_BT, tmp_path, record_property
):
    shape = {} if family in ("qwen2", "phi3") else WIDE_HEADS
    dense = dense_of(family, tied=tied, **shape)
    layout = layout_of(dense)
    record = export_gguf(dense, layout, tmp_path / "out", GgufConfig(format=name), tokens_BT)
    if name == "gguf_llama":
        exponents = [router.exponent for router in record.routers]
        with softmax_gated(dense, layout, exponents):
            reference = logits_of(dense.model, tokens_BT)
    else:
        with masked_by(dense, layout):
            reference = logits_of(dense.model, tokens_BT)
    error = median_error(by_llama_cpp(tmp_path / "out", tokens_BT), reference)
    record_property("error", error)
    assert error < 1e-5
    assert record.verification.run.all_experts_error < (1e-5 if "glm4" in name else 3e-3)


def test_the_file_agrees_with_the_transformers_export(dense_of, layout_of, tokens_BT, tmp_path):
    dense = dense_of("qwen3")
    layout = layout_of(dense)
    export(dense, layout, tmp_path / "stock", ExportConfig(), tokens_BT)
    export_gguf(dense, layout, tmp_path / "out", GgufConfig(), tokens_BT)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stock", dtype=torch.float32)
    # The stock gates deviate from 1 by what their float32 sigmoid needs; those of the GGUF do not.
    reference = logits_of(stock, tokens_BT)
    assert median_error(by_llama_cpp(tmp_path / "out", tokens_BT), reference) < 2e-3


@pytest.mark.parametrize(
    ("name", "scaling"),
    [
        ("gguf_llama", LLAMA3),
        ("gguf_llama", LINEAR),
        ("gguf_llama", YARN),
        ("gguf_llama", ODD_YARN),
        ("gguf_glm4moe", LINEAR),
        ("gguf_glm4moe", YARN),
        ("gguf_glm4moe", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    ],
    ids=[
        "llama-llama3",
        "llama-linear",
        "llama-yarn",
        "llama-odd",
        "glm-linear",
        "glm-yarn",
        "glm-theta",
    ],
)
def test_scaled_rotary_embeddings_run_as_in_transformers(
    name, scaling, dense_of, layout_of, tokens_BT, tmp_path
):
    dense = dense_of("llama", **scaling)
    layout = layout_of(dense, active_experts=12)
    out = tmp_path / "out"
    export_gguf(dense, layout, out, GgufConfig(format=name), tokens_BT)
    row = tokens_BT.reshape(1, -1)[:, :256]
    error = median_error(by_llama_cpp(out, row), logits_of(dense.model, row))
    assert error < (2e-5 if name == "gguf_glm4moe" else 3e-3)


def test_frequency_factors_are_not_ignored(dense_of, tokens_BT, tmp_path, monkeypatch):
    dense = dense_of("llama", **LLAMA3)
    right = write_dense_gguf(dense, tmp_path / "right", GgufConfig(), tokens_BT)
    assert right.verification.run.logits_error < 1e-5
    monkeypatch.setattr(decoder, "frequency_factors", lambda dense: (None, 1.0))
    with pytest.raises(VerificationError, match="otherwise than the masked dense model"):
        write_dense_gguf(dense, tmp_path / "wrong", GgufConfig(), tokens_BT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["right"]


def test_unpermuted_heads_would_be_found(dense_of, layout_of, tokens_BT, tmp_path, monkeypatch):
    dense = dense_of("llama")
    monkeypatch.setattr(
        decoder, "pairwise_order", lambda heads, head_dim: torch.arange(heads * head_dim)
    )
    monkeypatch.setattr(
        "dotmoe.gguf_export.read_back.halves_order", lambda rows, heads, head_dim: rows
    )
    layout, config = layout_of(dense), GgufConfig(format="gguf_llama")
    with pytest.raises(VerificationError, match="otherwise than the"):
        export_gguf(dense, layout, tmp_path / "out", config, tokens_BT)


@pytest.mark.parametrize("tied", [False, True])
def test_always_on_neurons_and_dense_layers_run(tied, dense_of, layout_of, tokens_BT, tmp_path):
    dense = dense_of("llama", num_hidden_layers=3, tied=tied)
    layout = layout_of(dense, num_experts=12, active_experts=3, shared_size=12, dense_layers=1)
    export_gguf(dense, layout, tmp_path / "out", GgufConfig(), tokens_BT)
    with masked_by(dense, layout):
        reference = logits_of(dense.model, tokens_BT)
    assert median_error(by_llama_cpp(tmp_path / "out", tokens_BT), reference) < 1e-5


def test_a_sliding_window_is_right_up_to_the_context_limit(
    dense_of, layout_of, tokens_BT, tmp_path
):
    dense = dense_of("mistral", sliding_window=40)
    layout = layout_of(dense)
    export_gguf(dense, layout, tmp_path / "out", GgufConfig(), tokens_BT)
    with masked_by(dense, layout):
        short, longer = (logits_of(dense.model, tokens_BT[:, :n]) for n in (40, 80))
    assert median_error(by_llama_cpp(tmp_path / "out", tokens_BT[:, :40]), short) < 1e-5
    # The limit is needed: beyond the window the two differ.
    beyond = by_llama_cpp(tmp_path / "out", tokens_BT)[:, 60:]
    assert median_error(beyond, longer[:, 60:]) > 0.02


@pytest.mark.parametrize("name", ["gguf_llama", "gguf_glm4moe"])
@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q4_0"])
def test_every_number_format_runs(name, kind, dense_of, layout_of, tokens_BT, tmp_path):
    dense = dense_of("llama", intermediate_size=384)  # experts of 32: down can be quantised too
    config = GgufConfig(format=name, type=kind)
    record = export_gguf(dense, layout_of(dense), tmp_path / "out", config, tokens_BT)
    run = record.verification.run
    assert record.fallbacks == []
    # bfloat16 of float32 weights loses 2^-9 of a weight at most, 4 bits an eighth of the largest.
    assert 0 < record.verification.storing_error < {"q4_0": 0.15, "q8_0": 0.01}.get(kind, 0.003)
    assert run.all_experts_error < 0.03
    assert run.tokenized_texts == 5


def test_rows_that_no_block_divides_are_stored_in_float16_and_run(
    dense_of, layout_of, tokens_BT, tmp_path
):
    dense = dense_of("llama")  # experts of 8
    config = GgufConfig(type="q8_0")
    record = export_gguf(dense, layout_of(dense), tmp_path / "out", config, tokens_BT)
    assert record.tensor_types["F16"] == len(record.fallbacks) == 4
    assert "blk.1.ffn_down_exps.weight" in record.fallbacks


@pytest.mark.parametrize("name", ["gguf_llama", "gguf_glm4moe"])
@pytest.mark.parametrize("active_experts", [1, 7, 12])
def test_k_changed_in_place_gives_the_masked_model_with_that_k(
    name, active_experts, dense_of, layout_of, tokens_BT, tmp_path
):
    dense = dense_of("llama")
    layout = layout_of(dense)
    out = tmp_path / "out"
    export_gguf(dense, layout, out, GgufConfig(format=name), tokens_BT)
    set_active_experts(out / "model-f32.gguf", active_experts)
    with masked_by(dense, layout.with_active_experts(active_experts)):
        reference = logits_of(dense.model, tokens_BT)
    limit = 1e-5 if name == "gguf_glm4moe" else 3e-3
    assert median_error(by_llama_cpp(out, tokens_BT), reference) < limit


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_dense_file_scores_and_generates_as_transformers(family, dense_of, tokens_BT, tmp_path):
    dense = dense_of(family)
    record = write_dense_gguf(dense, tmp_path / "out", GgufConfig(), tokens_BT)
    assert record.verification.run.logits_error < 1e-5
    expected = stock_nats(dense.model)(tokens_BT)
    prompt = tokens_BT[0, :20]
    with LlamaCppModel(tmp_path / "out/model-f32.gguf", context=96) as model:
        found = row_nats(model.logits)(tokens_BT)
        made = model.greedy(prompt.tolist(), 40)
        with pytest.raises(UserError, match=r"97 tokens.*context of 96"):
            model.logits(torch.zeros(97, dtype=torch.long))
    assert float(found.mean()) == pytest.approx(float(expected.mean()), rel=1e-6)
    stock = dense.model.generate(
        prompt[None], max_new_tokens=40, min_new_tokens=40, do_sample=False, use_cache=True
    )
    # Transformers forbids the end of text for the first 40 tokens; greedy of ours does not.
    if dense.config.eos_token_id not in made:
        assert made == stock[0, 20:].tolist()


def test_k_of_all_experts_is_not_checked_where_llama_cpp_would_abort(
    dense_of, layout_of, tokens_BT, tmp_path
):
    dense = dense_of("llama", num_hidden_layers=12)  # 171 tensors: room for k of 28
    layout = layout_of(dense, num_experts=48, active_experts=24)
    record = export_gguf(dense, layout, tmp_path / "out", GgufConfig(tokenizer="none"), tokens_BT)
    run = record.verification.run
    assert run.all_experts_error is None
    assert run.logits_error < 1e-5


def test_a_death_of_llama_cpp_is_one_line(dense_of, tokens_BT, tmp_path):
    dense = dense_of("llama")
    write_dense_gguf(dense, tmp_path / "out", GgufConfig(), tokens_BT)
    file = tmp_path / "out/model-f32.gguf"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"ended with status 1 \(llama_model_load: error") as caught:
        LlamaCppModel(file, context=8)
    assert "\n" not in str(caught.value)


def test_real_checkpoints_run(shared_data, layout_of, tmp_path):
    folder = shared_data / "models/stories260K"
    if not folder.is_dir():
        pytest.skip(f"no checkpoint at {folder}")
    dense = load_dense(str(folder), LoadConfig(device="cpu"))
    text = "Once upon a time, there was a little girl named Lily. She loved to play outside. " * 9
    ids = torch.tensor(dense.tokenizer(text).input_ids[:200])[None]
    layout = layout_of(dense, num_experts=43, active_experts=11)
    for name in GGUF_OUTPUTS:
        config = GgufConfig(format=name)
        record = export_gguf(dense, layout, tmp_path / name, config, ids)
        assert record.tokenizer == "llama/default"
        assert record.verification.run.tokenized_texts == 5
        assert record.verification.run.top1_agreement > 0.95
