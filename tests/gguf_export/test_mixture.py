"""What stands in an exported file, read with the gguf package alone."""

import json

import pytest
import torch
from gguf import GGUFReader, quants
from safetensors.torch import load_file

from dotmoe.errors import UserError, VerificationError
from dotmoe.export.format import granularity_of
from dotmoe.gguf_export import (
    GgufConfig,
    GgufRecord,
    export_gguf,
    file_writer,
    gguf_output_for,
    read_back,
    write_dense_gguf,
)

LLAMA3_ROPE = {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
}
FORMATS_OF = {
    "llama": ("gguf_llama", "gguf_glm4moe"),
    "mistral": ("gguf_llama", "gguf_glm4moe"),
    "qwen2": ("gguf_llama", "gguf_glm4moe"),
    "qwen3": ("gguf_glm4moe",),
}
CASES = [(family, name) for family, names in FORMATS_OF.items() for name in names]
PREFIX = {"gguf_llama": "llama", "gguf_glm4moe": "glm4moe"}


@pytest.fixture(autouse=True)
def _without_llama_cpp(monkeypatch):
    monkeypatch.setattr("dotmoe.gguf_export.written.is_installed", lambda: False)


def values(reader):
    """Tensors by name, float32, in torch's order of dimensions."""
    made = {}
    for tensor in reader.tensors:
        decoded = torch.from_numpy(quants.dequantize(tensor.data, tensor.tensor_type).copy())
        made[tensor.name] = decoded.view(*[int(n) for n in reversed(tensor.shape)])
    return made


def key(reader, name):
    return reader.fields[name].contents()


@pytest.mark.parametrize(("family", "name"), CASES)
def test_experts_are_the_dense_rows_and_routers_the_scaled_ones(
    family, name, dense_of, layout_of, tokens_BT, tmp_path
):
    dense = dense_of(family)
    layout = layout_of(dense)
    record = export_gguf(dense, layout, tmp_path / "out", GgufConfig(format=name), tokens_BT)
    file = values(GGUFReader(tmp_path / "out/model-f32.gguf"))
    stored = load_file(dense.folder / "model.safetensors")
    for layer in range(2):
        for expert in range(12):
            neurons = [n for n in range(96) if layout.expert_of_neuron_LN[layer, n] == expert]
            mlp = f"model.layers.{layer}.mlp"
            gate = stored[f"{mlp}.gate_proj.weight"][neurons]
            down = stored[f"{mlp}.down_proj.weight"][:, neurons]
            assert torch.equal(file[f"blk.{layer}.ffn_gate_exps.weight"][expert], gate)
            assert torch.equal(file[f"blk.{layer}.ffn_down_exps.weight"][expert], down)
        exponent = record.routers[layer].exponent
        assert torch.equal(
            file[f"blk.{layer}.ffn_gate_inp.weight"] * 2.0**exponent, layout.router_LED[layer]
        )
    assert record.verification.storing_error == 0
    assert record.tensor_types == {"F32": len(file)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("num_heads", [1, 3])
def test_rotating_pairs_of_permuted_rows_is_rotating_halves(num_heads):
    from dotmoe.gguf_export.rope import halves_order, pairwise_order

    head_dim, positions = 8, torch.arange(5.0)
    angles = positions[:, None] * 10000.0 ** -(torch.arange(4.0) / 4)
    weight = torch.randn(num_heads * head_dim, 6)
    x = torch.randn(5, 6)

    def turned(first, second):
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return first * cos - second * sin, first * sin + second * cos

    halves = (x @ weight.T).view(5, num_heads, 2, 4)
    expected = torch.cat(turned(halves[:, :, 0], halves[:, :, 1]), dim=2)
    permuted = weight[pairwise_order(num_heads, head_dim)]
    pairs = (x @ permuted.T).view(5, num_heads, 4, 2)
    actual = torch.cat(turned(pairs[..., 0], pairs[..., 1]), dim=2)
    torch.testing.assert_close(actual, expected)
    assert torch.equal(halves_order(permuted, num_heads, head_dim), weight)


@pytest.mark.parametrize("name", ["gguf_llama", "gguf_glm4moe"])
def test_metadata_says_what_llama_cpp_needs(name, dense_of, layout_of, tokens_BT, tmp_path):
    dense = dense_of("qwen2", head_dim=24)
    export_gguf(dense, layout_of(dense), tmp_path / "out", GgufConfig(format=name), tokens_BT)
    reader = GGUFReader(tmp_path / "out/model-f32.gguf")
    arch = PREFIX[name]
    expected = {
        "general.architecture": arch,
        f"{arch}.block_count": 2,
        f"{arch}.context_length": 256,
        f"{arch}.embedding_length": 64,
        f"{arch}.attention.head_count": 4,
        f"{arch}.attention.head_count_kv": 2,
        f"{arch}.attention.key_length": 24,
        f"{arch}.attention.value_length": 24,
        f"{arch}.rope.dimension_count": 24,
        f"{arch}.rope.freq_base": 10000.0,
        f"{arch}.expert_count": 12,
        f"{arch}.expert_used_count": 3,
        f"{arch}.vocab_size": 264,
    }
    if name == "gguf_llama":
        expected["llama.feed_forward_length"] = 8
    else:
        expected |= {
            "glm4moe.expert_feed_forward_length": 8,
            "glm4moe.expert_gating_func": 3,
            "glm4moe.expert_weights_norm": False,
            "glm4moe.expert_weights_scale": 3.0,
            "glm4moe.expert_shared_count": 1,
            "glm4moe.leading_dense_block_count": 0,
        }
    assert {name: key(reader, name) for name in expected} == expected
    assert key(reader, f"{arch}.attention.layer_norm_rms_epsilon") == pytest.approx(1e-6)
    names = {tensor.name for tensor in reader.tensors}
    assert "blk.1.attn_k.bias" in names
    assert "output.weight" in names
    assert all(min(tensor.shape) > 0 for tensor in reader.tensors)


def test_a_tied_head_is_left_out(dense_of, layout_of, tokens_BT, tmp_path):
    dense = dense_of("llama", tied=True)
    export_gguf(dense, layout_of(dense), tmp_path / "out", GgufConfig(), tokens_BT)
    names = {tensor.name for tensor in GGUFReader(tmp_path / "out/model-f32.gguf").tensors}
    assert "token_embd.weight" in names
    assert "output.weight" not in names


def test_without_always_on_neurons_the_shared_expert_is_zero(
    dense_of, layout_of, tokens_BT, tmp_path
):
    dense = dense_of("llama")
    config = GgufConfig(format="gguf_glm4moe")
    record = export_gguf(dense, layout_of(dense), tmp_path / "out", config, tokens_BT)
    file = values(GGUFReader(tmp_path / "out/model-f32.gguf"))
    for projection, shape in {"gate": (8, 64), "up": (8, 64), "down": (64, 8)}.items():
        shared = file[f"blk.1.ffn_{projection}_shexp.weight"]
        assert tuple(shared.shape) == shape
        assert not shared.any()
    assert not file["blk.0.exp_probs_b.bias"].any()
    assert any("shared expert of zeros" in note for note in record.notes)


def test_always_on_neurons_and_dense_layers_have_their_places(
    dense_of, layout_of, tokens_BT, tmp_path
):
    dense = dense_of("llama", num_hidden_layers=3)
    layout = layout_of(dense, num_experts=10, active_experts=2, shared_size=16, dense_layers=1)
    record = export_gguf(dense, layout, tmp_path / "out", GgufConfig(), tokens_BT)
    assert record.format == "gguf_glm4moe"
    reader = GGUFReader(tmp_path / "out/model-f32.gguf")
    file, stored = values(reader), load_file(dense.folder / "model.safetensors")
    assert key(reader, "glm4moe.leading_dense_block_count") == 1
    assert key(reader, "glm4moe.expert_shared_count") == 2
    assert torch.equal(file["blk.0.ffn_down.weight"], stored["model.layers.0.mlp.down_proj.weight"])
    assert "blk.0.ffn_gate_inp.weight" not in file
    always = (layout.expert_of_neuron_LN[2] == -1).nonzero().flatten()
    shared = file["blk.2.ffn_up_shexp.weight"]
    assert torch.equal(shared, stored["model.layers.2.mlp.up_proj.weight"][always])


def test_a_shared_expert_that_does_not_fill_its_place_is_padded_with_zeros(
    dense_of, layout_of, tokens_BT, tmp_path
):
    dense = dense_of("llama")
    layout = layout_of(dense, num_experts=12, active_experts=3, shared_size=12)  # experts of 7
    export_gguf(dense, layout, tmp_path / "out", GgufConfig(), tokens_BT)
    shared = values(GGUFReader(tmp_path / "out/model-f32.gguf"))["blk.0.ffn_down_shexp.weight"]
    assert shared.shape == (64, 14)
    assert shared[:, :12].any()
    assert not shared[:, 12:].any()


@pytest.mark.parametrize(
    ("family", "arguments", "split", "name", "reason"),
    [
        ("llama", LLAMA3_ROPE, {}, "gguf_glm4moe", "rope_type is 'llama3'.*gguf_llama"),
        ("qwen3", {}, {}, "gguf_llama", "QK-norm"),
        ("qwen3", LLAMA3_ROPE, {}, "auto", "rope_type is 'llama3'"),
        ("llama", {}, {"shared_size": 12}, "gguf_llama", "shared expert.*gguf_glm4moe"),
        ("llama", {}, {"dense_layers": 1}, "gguf_llama", "dense layers.*gguf_glm4moe"),
        ("llama", {}, {"num_experts": 1, "active_experts": 1}, "gguf_llama", "1 experts"),
        ("llama", {}, {}, "gguf_lama", "Did you mean gguf_llama"),
        ("granite", {"embedding_multiplier": 12.0}, {}, "auto", "multiplies embeddings"),
        ("olmo2", {}, {}, "auto", "norms after attention|full QK-norm"),
        ("llama", {"attention_bias": True}, {}, "gguf_glm4moe", "bias on the attention's output"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            {},
            "gguf_llama",
            "'dynamic'",
        ),
    ],
)
def test_what_llama_cpp_would_compute_wrongly_is_refused(
    family, arguments, split, name, reason, dense_of, layout_of, tokens_BT, tmp_path
):
    dense = dense_of(family, **arguments)
    layout, config = layout_of(dense, **split), GgufConfig(format=name)
    with pytest.raises(UserError, match=reason) as caught:
        export_gguf(dense, layout, tmp_path / "out", config, tokens_BT)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_auto_takes_the_format_with_exact_gates_where_it_can(dense_of, layout_of):
    plain, scaled = dense_of("llama"), dense_of("llama", **LLAMA3_ROPE)
    granularity = granularity_of(layout_of(plain))
    assert gguf_output_for(plain, granularity, "auto").name == "gguf_glm4moe"
    assert gguf_output_for(scaled, granularity, "auto").name == "gguf_llama"


def test_frequency_factors_give_the_frequencies_of_transformers(
    dense_of, layout_of, tokens_BT, tmp_path
):
    dense = dense_of("llama", **LLAMA3_ROPE)
    export_gguf(dense, layout_of(dense), tmp_path / "out", GgufConfig(), tokens_BT)
    factors = values(GGUFReader(tmp_path / "out/model-f32.gguf"))["rope_freqs.weight"]
    plain = 5e5 ** -(torch.arange(8.0) / 8)
    expected = dense.model.model.rotary_emb.inv_freq
    torch.testing.assert_close(plain / factors, expected, rtol=1e-6, atol=0)
    assert factors.max() == pytest.approx(8.0)


def test_a_sliding_window_becomes_the_context_limit(dense_of, layout_of, tokens_BT, tmp_path):
    dense = dense_of("mistral", sliding_window=40)
    record = export_gguf(dense, layout_of(dense), tmp_path / "out", GgufConfig(), tokens_BT)
    reader = GGUFReader(tmp_path / "out/model-f32.gguf")
    assert key(reader, "glm4moe.context_length") == record.context == 40
    assert any("sliding window of 40" in note for note in record.notes)


def test_the_record_and_card_tell_what_was_done(dense_of, layout_of, tokens_BT, tmp_path):
    dense = dense_of("llama")
    record = export_gguf(dense, layout_of(dense), tmp_path / "out", GgufConfig(), tokens_BT)
    assert GgufRecord.load(tmp_path / "out") == record
    stored = json.loads((tmp_path / "out/dotmoe.json").read_text())
    assert stored["verification"]["run"] is None
    assert stored["active_experts"] == 3
    assert all(router.exponent == 40 for router in record.routers)
    assert max(router.gate_deviation for router in record.routers) < 1e-6
    card = (tmp_path / "out/README.md").read_text()
    assert "3 of 12 experts" in card
    assert "llama-server -m model-f32.gguf" in card
    assert "was not installed" in card


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_dense_model_itself_can_be_written(family, dense_of, tokens_BT, tmp_path):
    dense = dense_of(family)
    record = write_dense_gguf(dense, tmp_path / "out", GgufConfig(), tokens_BT)
    file = values(GGUFReader(tmp_path / "out/model-f32.gguf"))
    stored = load_file(dense.folder / "model.safetensors")
    assert record.arch == ("qwen3" if family == "qwen3" else "llama")
    assert len(file) == len(stored)
    assert torch.equal(file["blk.1.ffn_up.weight"], stored["model.layers.1.mlp.up_proj.weight"])


def test_a_full_disk_leaves_nothing(dense_of, layout_of, tokens_BT, tmp_path, monkeypatch):
    dense = dense_of("llama")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file_writer, "_write_rows", full)
    with pytest.raises(UserError, match=r"No space left.*bytes are needed"):
        export_gguf(dense, layout_of(dense), tmp_path / "out", GgufConfig(), tokens_BT)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("broken", range(18))
def test_a_wrong_bit_anywhere_is_found_when_read_back(
    broken, dense_of, layout_of, tokens_BT, tmp_path, monkeypatch
):
    dense = dense_of("qwen2", num_hidden_layers=1, intermediate_size=32)
    layout = layout_of(dense, num_experts=4)
    right = file_writer.encode
    calls = iter(range(100))

    def one_bit_off(rows, kind):
        encoded = bytearray(right(rows, kind))
        if next(calls) == broken:
            encoded[6] ^= 1
        return bytes(encoded)

    monkeypatch.setattr(file_writer, "encode", one_bit_off)
    with pytest.raises(VerificationError, match=r"came back|not what was written|not padded"):
        export_gguf(dense, layout, tmp_path / "out", GgufConfig(), tokens_BT)
    assert next(calls) > broken
    assert not list(tmp_path.iterdir())


def test_a_wrong_key_is_found_when_read_back(dense_of, layout_of, tokens_BT, tmp_path):
    dense = dense_of("llama")
    export_gguf(dense, layout_of(dense), tmp_path / "out", GgufConfig(), tokens_BT)
    from dotmoe.gguf_export.gguf_file import GgufFile

    file = GgufFile(tmp_path / "out/model-f32.gguf")
    right = {name: file.metadata(name) for name in file.keys}
    read_back.check_metadata(file, right)
    with pytest.raises(VerificationError, match=r"expert_used_count.*'3' instead of '4'"):
        read_back.check_metadata(file, {**right, "glm4moe.expert_used_count": 4})
    with pytest.raises(VerificationError, match="expert_count"):
        read_back.check_metadata(file, {n: v for n, v in right.items() if "expert_count" not in n})
