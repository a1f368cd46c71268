"""Files run in llama.cpp itself, beside Transformers; skipped where it is not installed."""

import pytest
import torch

pytest.importorskip("llama_cpp")

from dotmoe.common.errors import UserError, VerificationError
from dotmoe.export import gguf_format
from dotmoe.export.llama_cpp import LlamaCppModel
from export.comparison import logits_of, masked_logits, relative_error, without_last
from runs import LLAMA3_ROPE, rope

LIMIT = 3e-3
"""Gates are a softmax of scaled logits, so nearly 1; see `router_exponent`."""
WIDE_HEADS = {"head_dim": 24, "num_key_value_heads": 1}
SIZES = {"factor": 4.0, "original_max_position_embeddings": 64}
YARN, ODD_YARN = (
    rope("yarn", **SIZES, **odd) for odd in ({}, {"beta_fast": 16.0, "attention_factor": 1.3})
)
LINEAR, THETA = rope("linear", factor=4.0), rope("default", 1e6)


@pytest.fixture
def write(exported):
    """Exports to GGUF, into a folder of the format's name."""

    def make(dense="llama", layout=None, name="gguf_glm4moe", *, kind="f32", **more):
        return exported(dense, layout, out=name, format=name, gguf_type=kind, **more)

    return make


def logits_in_llama_cpp(made, tokens_BT):
    (file,) = made.folder.glob("*.gguf")
    with LlamaCppModel(file, context=tokens_BT.shape[1]) as runtime:
        return torch.stack([runtime.logits(row) for row in tokens_BT])


def error_of(made, tokens_BT, first=0):
    """How far llama.cpp is from the masked model, from a token of the rows on."""
    expected = masked_logits(made.dense, made.layout, tokens_BT)
    return relative_error(logits_in_llama_cpp(made, tokens_BT)[:, first:], expected[:, first:])


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        *(("llama", {"tied": True}), ("mistral", WIDE_HEADS), ("phi3", {})),
        *(("qwen2", {"tied": True}), ("qwen3", WIDE_HEADS)),
    ],
)
def test_every_family_runs_as_the_masked_dense_model(family, shape, dense_of, write, tokens_BT):
    dense = dense_of(family, **shape)
    for name in ("gguf_glm4moe",) if family == "qwen3" else ("gguf_llama", "gguf_glm4moe"):
        made = write(dense, name=name)
        assert error_of(made, tokens_BT) < LIMIT
        assert made.record.verification["run"]["all_experts_error"] < LIMIT
    assert write(dense, name="gguf_dense").record.verification["run"]["logits_error"] < 1e-5


@pytest.mark.parametrize(
    ("name", "scaling"),
    [
        *(("gguf_llama", scaling) for scaling in (LLAMA3_ROPE, LINEAR, YARN, ODD_YARN)),
        *(("gguf_glm4moe", scaling) for scaling in (LINEAR, THETA)),
    ],
)
def test_scaled_rotary_embeddings_run_as_in_transformers(name, scaling, dense_of, tokens_BT, write):
    made = write(dense_of("llama", **scaling), {"active_experts": 12}, name)
    text_BT = tokens_BT.reshape(1, -1)[:, :256]
    expected = logits_of(made.dense.model, text_BT)
    assert relative_error(logits_in_llama_cpp(made, text_BT), expected) < 2 * LIMIT


@pytest.mark.parametrize(
    ("name", "function", "wrong"),
    [
        ("gguf_dense", "frequency_factors", lambda config: (None, 1.0)),
        ("gguf_llama", "pairwise_order", lambda heads, size: torch.arange(heads * size)),
    ],
)
def test_a_wrong_rotation_is_found(name, function, wrong, dense_of, write, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_format, function, wrong)
    with pytest.raises(VerificationError, match="computes something else"):
        write(dense_of("llama", **LLAMA3_ROPE), name=name)
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}_unverified"]


@pytest.mark.parametrize("dropped", [0, 3])
def test_always_on_neurons_and_dense_layers_run(dropped, dense_of, layout_of, write, tokens_BT):
    dense = dense_of("llama", num_hidden_layers=3, tied=True)
    layout = layout_of(dense, shared_size=12, dense_layers=1)
    layout = without_last(layout, dropped)
    assert error_of(write(dense, layout), tokens_BT) < LIMIT


def test_a_sliding_window_is_right_up_to_the_context_limit(dense_of, tokens_BT, write):
    made = write(dense_of("mistral", sliding_window=40))
    assert error_of(made, tokens_BT[:, :40]) < LIMIT
    # The limit is needed: beyond the window the two differ.
    assert error_of(made, tokens_BT[:, :80], first=60) > 0.02


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q4_0"])
def test_every_number_format_runs(kind, dense_of, write):
    dense = dense_of("llama", intermediate_size=384)  # experts of 32: down can be quantised too
    name = "gguf_llama" if kind in ("f16", "q8_0") else "gguf_glm4moe"
    found = write(dense, name=name, kind=kind).record.verification
    # bfloat16 of float32 weights loses 2^-9 of a weight at most, 4 bits an eighth of the largest.
    assert 0 < found["storing_error"] < {"q4_0": 0.15, "q8_0": 0.01}.get(kind, 0.003)
    assert found["run"]["all_experts_error"] < {"q4_0": 0.5, "q8_0": 0.05}.get(kind, 0.02)
    assert found["run"]["tokenized_texts"] == 5


def test_k_of_all_experts_is_not_checked_where_llama_cpp_would_abort(dense_of, write):
    dense = dense_of("llama", num_hidden_layers=12)  # 171 tensors: room for k of 28
    run = write(dense, {"num_experts": 48, "active_experts": 24}).record.verification["run"]
    assert run["all_experts_error"] is None
    assert run["logits_error"] < LIMIT


def test_a_death_of_llama_cpp_is_one_line(write):
    file = write(name="gguf_dense").folder / "model-f32.gguf"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"ended with status 1 \(llama_model_load: error") as caught:
        LlamaCppModel(file, context=8)
    assert "\n" not in str(caught.value)
