"""Files run in llama.cpp itself, beside Transformers; skipped where it is not installed."""

from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("gguf")
pytest.importorskip("llama_cpp")

from dotmoe.errors import UserError, VerificationError
from dotmoe.export import ExportConfig, GgufConfig, export, gguf_format, set_active_experts
from dotmoe.llama_cpp import LlamaCppModel
from dotmoe.load import LoadConfig, load_dense
from dotmoe.moe.masked import masked_by

FORMATS_OF = {
    "llama": ("gguf_llama", "gguf_glm4moe"),
    "mistral": ("gguf_llama", "gguf_glm4moe"),
    "qwen2": ("gguf_llama", "gguf_glm4moe"),
    "qwen3": ("gguf_glm4moe",),
    "phi3": ("gguf_llama", "gguf_glm4moe"),
}
WIDE_HEADS = {"head_dim": 24, "num_key_value_heads": 1}


def rope(kind, **values):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **values}}


LLAMA3 = rope(
    "llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
YARN = rope("yarn", original_max_position_embeddings=64)
ODD_YARN = rope("yarn", original_max_position_embeddings=64, beta_fast=16.0, attention_factor=1.3)
THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}


@pytest.fixture
def write(tokens_BT, tmp_path):
    """Exports to GGUF; gives the record."""

    def make(dense, layout, name="gguf_glm4moe", *, out="out", kind="f32"):
        gguf = GgufConfig(type=kind)
        config = ExportConfig(format=name)
        return export(dense, layout, tmp_path / out, config, tokens_BT, gguf=gguf)

    return make


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
            logits = arguments[0] @ layout.router_LED[layer].T * 2.0 ** -exponents[layer]
            shares = torch.softmax(logits, dim=-1)
            chosen = shares.topk(layout.active_experts, dim=-1)
            weights = chosen.values / chosen.values.sum(dim=-1, keepdim=True)
            by_expert = torch.zeros_like(shares).scatter(-1, chosen.indices, weights)
            by_neuron[layer] = by_expert[..., layout.expert_of_neuron_LN[layer]]

        return hook

    def scale(layer):
        return lambda module, arguments: arguments[0] * by_neuron[layer] * layout.active_experts

    by_neuron, hooks = {}, []
    for index, layer in enumerate(dense.model.model.layers):
        hooks.append(layer.mlp.register_forward_pre_hook(gates(index)))
        hooks.append(layer.mlp.down_proj.register_forward_pre_hook(scale(index)))
    yield
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family, names in FORMATS_OF.items() for name in names]
)
def test_every_family_runs_as_the_masked_dense_model(
    family, name, tied, dense_of, layout_of, tokens_BT, write, tmp_path
):
    shape = {} if family in ("qwen2", "phi3") else WIDE_HEADS
    dense = dense_of(family, tied=tied, **shape)
    layout = layout_of(dense)
    record = write(dense, layout, name)
    reference = masked_by(dense, layout)
    if name == "gguf_llama":
        reference = softmax_gated(dense, layout, [each.exponent for each in record.routers])
    with reference:
        expected = logits_of(dense.model, tokens_BT)
    assert median_error(by_llama_cpp(tmp_path / "out", tokens_BT), expected) < 1e-5
    assert record.verification.run.all_experts_error < (1e-5 if "glm4" in name else 3e-3)


@pytest.mark.parametrize(
    ("name", "scaling"),
    [
        *(("gguf_llama", scaling) for scaling in (LLAMA3, rope("linear"), YARN, ODD_YARN)),
        *(("gguf_glm4moe", scaling) for scaling in (rope("linear"), YARN, THETA)),
    ],
)
def test_scaled_rotary_embeddings_run_as_in_transformers(
    name, scaling, dense_of, layout_of, tokens_BT, write, tmp_path
):
    dense = dense_of("llama", **scaling)
    write(dense, layout_of(dense, active_experts=12), name)
    row = tokens_BT.reshape(1, -1)[:, :256]
    error = median_error(by_llama_cpp(tmp_path / "out", row), logits_of(dense.model, row))
    assert error < (2e-5 if name == "gguf_glm4moe" else 3e-3)


@pytest.mark.parametrize(
    ("name", "function", "wrong"),
    [
        ("gguf_dense", "frequency_factors", lambda config: (None, 1.0)),
        ("gguf_llama", "pairwise_order", lambda heads, size: torch.arange(heads * size)),
    ],
)
def test_a_wrong_rotation_is_found(
    name, function, wrong, dense_of, layout_of, write, tmp_path, monkeypatch
):
    monkeypatch.setattr(gguf_format, function, wrong)
    dense = dense_of("llama", **LLAMA3)
    with pytest.raises(VerificationError, match="otherwise than the"):
        write(dense, layout_of(dense), name)
    assert [path.name for path in tmp_path.iterdir()] == ["out_unverified"]


@pytest.mark.parametrize("tied", [False, True])
def test_always_on_neurons_and_dense_layers_run(
    tied, dense_of, layout_of, tokens_BT, write, tmp_path
):
    dense = dense_of("llama", num_hidden_layers=3, tied=tied)
    layout = layout_of(dense, shared_size=12, dense_layers=1)
    write(dense, layout)
    with masked_by(dense, layout):
        reference = logits_of(dense.model, tokens_BT)
    assert median_error(by_llama_cpp(tmp_path / "out", tokens_BT), reference) < 1e-5


def test_a_sliding_window_is_right_up_to_the_context_limit(
    dense_of, layout_of, tokens_BT, write, tmp_path
):
    dense = dense_of("mistral", sliding_window=40)
    layout = layout_of(dense)
    write(dense, layout)
    with masked_by(dense, layout):
        short, longer = (logits_of(dense.model, tokens_BT[:, :n]) for n in (40, 80))
    assert median_error(by_llama_cpp(tmp_path / "out", tokens_BT[:, :40]), short) < 1e-5
    # The limit is needed: beyond the window the two differ.
    beyond = by_llama_cpp(tmp_path / "out", tokens_BT[:, :80])[:, 60:]
    assert median_error(beyond, longer[:, 60:]) > 0.02


@pytest.mark.parametrize("name", ["gguf_llama", "gguf_glm4moe"])
@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q4_0"])
def test_every_number_format_runs(name, kind, dense_of, layout_of, write):
    dense = dense_of("llama", intermediate_size=384)  # experts of 32: down can be quantised too
    record = write(dense, layout_of(dense), name, kind=kind)
    assert record.details["fallbacks"] == []
    # bfloat16 of float32 weights loses 2^-9 of a weight at most, 4 bits an eighth of the largest.
    assert 0 < record.verification.storing_error < {"q4_0": 0.15, "q8_0": 0.01}.get(kind, 0.003)
    most = {"q4_0": 0.5, "q8_0": 0.05}.get(kind, 0.02)
    assert record.verification.run.all_experts_error < most
    assert record.verification.run.tokenized_texts == 5


@pytest.mark.parametrize("name", ["gguf_llama", "gguf_glm4moe"])
def test_k_changed_in_place_gives_the_masked_model_with_that_k(
    name, dense_of, layout_of, tokens_BT, write, tmp_path
):
    dense = dense_of("llama")
    layout = layout_of(dense)
    write(dense, layout, name)
    for active_experts in (1, 7, 12):
        set_active_experts(tmp_path / "out", active_experts)
        with masked_by(dense, layout.with_active_experts(active_experts)):
            reference = logits_of(dense.model, tokens_BT)
        limit = 1e-5 if name == "gguf_glm4moe" else 3e-3
        assert median_error(by_llama_cpp(tmp_path / "out", tokens_BT), reference) < limit


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_dense_file_scores_as_transformers(
    family, dense_of, layout_of, tokens_BT, write, tmp_path
):
    dense = dense_of(family)
    record = write(dense, layout_of(dense), "gguf_dense")
    assert record.verification.run.logits_error < 1e-5
    with LlamaCppModel(tmp_path / "out/model-f32.gguf", context=96) as model:
        found = model.logits(tokens_BT[0])
        with pytest.raises(UserError, match=r"97 tokens.*context of 96"):
            model.logits(torch.zeros(97, dtype=torch.long))
    assert (found - logits_of(dense.model, tokens_BT[:1])[0]).abs().max() < 1e-3


def test_k_of_all_experts_is_not_checked_where_llama_cpp_would_abort(dense_of, layout_of, write):
    dense = dense_of("llama", num_hidden_layers=12)  # 171 tensors: room for k of 28
    run = write(dense, layout_of(dense, num_experts=48, active_experts=24)).verification.run
    assert run.all_experts_error is None
    assert run.logits_error < 1e-5


def test_a_death_of_llama_cpp_is_one_line(dense_of, layout_of, write, tmp_path):
    dense = dense_of("llama")
    write(dense, layout_of(dense), "gguf_dense")
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
    for name in ("gguf_llama", "gguf_glm4moe"):
        config, gguf = ExportConfig(format=name), GgufConfig(type="f32")
        record = export(dense, layout, tmp_path / name, config, ids, gguf=gguf)
        assert record.details["tokenizer"] == "llama/default"
        assert record.verification.run.tokenized_texts == 5
        assert record.verification.run.top1_agreement > 0.95
