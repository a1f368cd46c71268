"""What stands in an exported GGUF, read with the gguf package alone; what is refused."""

from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dotmoe.common.errors import UserError, VerificationError
from dotmoe.common.worker import WorkerDiedError
from dotmoe.export import gguf_file, llama_cpp
from dotmoe.export.format import TensorSpec
from dotmoe.export.gguf_file import write_gguf
from dotmoe.export.gguf_format import GgufFormat
from dotmoe.export.write import ExportRecord
from dotmoe.models.from_gguf import GgufFile
from runs import LLAMA3_ROPE, rope

YARN_ROPE, DYNAMIC_ROPE = rope("yarn", factor=2.0), rope("dynamic", factor=2.0)
ROOMY = {"num_experts": 48, "active_experts": 32}  # llama.cpp 0.3.36 runs k = 30 and not 32


@pytest.fixture(autouse=True)
def _without_llama_cpp(monkeypatch):
    monkeypatch.setattr(llama_cpp, "is_installed", lambda: False)


@pytest.fixture
def write(exported):
    """Exports to GGUF; gives the record and the file."""

    def make(dense="llama", layout=None, name="gguf_glm4moe", *, out="out", type="f32"):
        made = exported(dense, layout, out=out, format=name, gguf_type=type)
        return made.record, GgufFile(made.folder / made.record.files[0])

    return make


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "gguf_llama"), ("phi3", "gguf_llama"), ("qwen3", "gguf_glm4moe")],
)
def test_experts_are_the_dense_rows_and_routers_the_scaled_ones(
    family, name, dense_of, layout_of, write
):
    dense = dense_of(family)
    layout = layout_of(dense)
    record, file = write(dense, layout, name)
    weights = load_file(dense.folder / "model.safetensors")
    for layer in range(2):
        mlp = f"model.layers.{layer}.mlp"
        fused = weights.get(f"{mlp}.gate_up_proj.weight")
        gates = weights[f"{mlp}.gate_proj.weight"] if fused is None else fused[:96]
        downs = weights[f"{mlp}.down_proj.weight"]
        for expert in range(12):
            neurons = layout.expert_of_neuron_LN[layer] == expert
            gate, down = (
                file.tensor(f"blk.{layer}.ffn_{part}_exps.weight")[expert]
                for part in ("gate", "down")
            )
            assert torch.equal(gate, gates[neurons])
            assert torch.equal(down, downs[:, neurons])
        scaled = file.tensor(f"blk.{layer}.ffn_gate_inp.weight")
        factor = 2.0 ** record.routers[layer]["exponent"]
        assert torch.equal(scaled * factor, layout.router_LED[layer])
    assert record.verification["storing_error"] == 0
    assert {tensor.tensor_type.name for tensor in file.tensors.values()} == {"F32"}


def test_always_on_neurons_and_dense_layers_have_their_places(dense_of, layout_of, write):
    dense = dense_of("llama", num_hidden_layers=3, tied=True)
    layout = layout_of(dense, num_experts=12, shared_size=12, dense_layers=1)  # experts of 7
    record, file = write(dense, layout, "gguf")
    assert record.format == "gguf_glm4moe"
    weights = load_file(dense.folder / "model.safetensors")
    assert file.size("leading_dense_block_count") == 1
    assert file.size("expert_shared_count") == 2
    dense_down = weights["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(file.tensor("blk.0.ffn_down.weight"), dense_down)
    assert not {"blk.0.ffn_gate_inp.weight", "output.weight"} & file.tensors.keys()
    always = (layout.expert_of_neuron_LN[2] == -1).nonzero().flatten()
    shared = file.tensor("blk.2.ffn_up_shexp.weight")
    assert torch.equal(shared[:12], weights["model.layers.2.mlp.up_proj.weight"][always])
    assert shared.shape == (14, 64)
    assert not shared[12:].any()


def test_frequency_factors_give_the_frequencies_of_transformers(dense_of, write):
    dense = dense_of("llama", **LLAMA3_ROPE)
    record, file = write(dense, name="gguf")
    assert record.format == "gguf_llama"
    found = 5e5 ** -(torch.arange(8.0) / 8) / file.tensor("rope_freqs.weight")
    torch.testing.assert_close(found, dense.model.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("family", "arguments", "split", "name", "reason"),
    [
        ("llama", LLAMA3_ROPE, {}, "gguf_glm4moe", "rope_type is 'llama3'.*gguf_llama"),
        ("llama", YARN_ROPE, {}, "gguf_glm4moe", "rope_type is 'yarn'.*gguf_llama"),
        ("qwen3", {}, {}, "gguf_llama", "norms: head, which gguf_llama cannot hold"),
        ("qwen3", LLAMA3_ROPE, {}, "gguf", "rope_type is 'llama3'"),
        ("llama", {}, {"shared_size": 12}, "gguf_llama", "a shared expert.*gguf_glm4moe"),
        ("llama", LLAMA3_ROPE, {"shared_size": 12}, "gguf_llama", r"shared expert.*cannot hold\.$"),
        ("llama", {}, {"dense_layers": 1}, "gguf_llama", "dense layers.*gguf_glm4moe"),
        ("llama", {}, {"num_experts": 1, "active_experts": 1}, "gguf_llama", "1 experts"),
        ("llama", {}, {}, "gguf_lama", "Did you mean gguf_llama"),
        ("granite", {"embedding_multiplier": 12.0}, {}, "gguf", "multipliers"),
        ("olmo2", {}, {}, "gguf_dense", "norms after"),
        ("llama", {"attention_bias": True}, {}, "gguf_glm4moe", "qkvo biases"),
        ("llama", DYNAMIC_ROPE, {}, "gguf_llama", "rope_type dynamic"),
        ("llama", {"num_hidden_layers": 12}, ROOMY, "gguf_glm4moe", "32 experts.*room for 28"),
    ],
)
def test_what_llama_cpp_would_compute_wrongly_is_refused(
    family, arguments, split, name, reason, dense_of, write, tmp_path
):
    with pytest.raises(UserError, match=reason) as caught:
        write(dense_of(family, **arguments), split, name)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_routers_of_a_file_survive_float16(dense_of, write):
    """As a product of float16 factors, as on Metal, ranks experts: NumPy says how."""
    _, file = write(dense_of("mistral"))
    for layer in range(2):
        rows_ED = file.tensor(f"blk.{layer}.ffn_gate_inp.weight").numpy()
        x_TD = np.random.default_rng(layer).standard_normal((500, rows_ED.shape[1]))
        exact_TE = x_TD @ rows_ED.T.astype(np.float64)
        rounded = x_TD.astype(np.float16).astype(float) @ rows_ED.astype(np.float16).T.astype(float)
        chosen, expected = ((-each).argsort(axis=1)[:, :3] for each in (rounded, exact_TE))
        assert np.mean(np.sort(chosen) == np.sort(expected)) > 0.95


def test_record_and_card_say_what_was_done(dense_of, write, tmp_path):
    record, file = write(dense_of("mistral", sliding_window=40))
    assert ExportRecord.load(tmp_path / "out") == record
    assert file.size("context_length") == record.details["context"] == 40
    runtimes = {each["runtime"]: each for r in record.routers for each in r["runtimes"]}
    assert [*runtimes] == ["llama.cpp", "llama.cpp on Metal and Vulkan"]
    assert max(each["gate_deviation"] for each in runtimes.values()) < 2**-6
    card = (tmp_path / "out/README.md").read_text()
    said = ("3 of 12 experts", "llama-server -m model-f32.gguf", "was not installed")
    for words in (*said, "Beyond 40 tokens", "library_name: gguf"):
        assert words in card


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_dense_model_itself_can_be_written(family, tiny_dense, write, tmp_path):
    record, file = write(family, name="gguf_dense")
    assert file.arch == family
    assert len(file.tensors) == len(load_file(tiny_dense(family) / "model.safetensors"))
    assert record.num_experts == record.active_experts == 0
    assert record.parameters.keys() == {"dense", "written"}
    assert ", not split" in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize("broken", ["blk.0.attn_q.bias", "blk.0.ffn_up_exps.weight", "rope_freqs"])
def test_a_wrong_bit_is_found_when_read_back(broken, dense_of, write, tmp_path, monkeypatch):
    dense = dense_of("qwen2", num_hidden_layers=1, intermediate_size=32, **LLAMA3_ROPE)
    right, calls = gguf_file.encoded, []

    def one_bit_off(spec, tensor):
        encoded = right(spec, tensor)
        if spec.name.startswith(broken) and not calls:
            calls.append(spec.name)
            encoded.view(np.uint8).reshape(-1)[6] ^= 1
        return encoded

    monkeypatch.setattr(gguf_file, "encoded", one_bit_off)
    place = r"out_unverified/model-f32.gguf is not what was written"
    with pytest.raises(VerificationError, match=f"{broken}.* in .*/{place}"):
        write(dense, {"num_experts": 4}, "gguf_llama")
    assert [path.name for path in tmp_path.iterdir()] == ["out_unverified"]


def test_a_wrong_key_is_found_when_read_back(write, monkeypatch):
    right, calls = GgufFormat.header, []

    def written(self, conversion):
        calls.append(conversion)
        return right(self, conversion) | {"llama.expert_used_count": 3 + (len(calls) == 1)}

    monkeypatch.setattr(GgufFormat, "header", written)
    words = r"llama.expert_used_count in .* '4' instead of '3'"
    with pytest.raises(VerificationError, match=words):
        write(name="gguf_llama")


@pytest.mark.parametrize("answers", [0, 1])  # none, or those at the file's own k
def test_a_file_that_llama_cpp_dies_of_is_kept_unverified(answers, write, tmp_path, monkeypatch):
    alive = MagicMock()
    alive.__enter__.return_value.logits = lambda tokens_T: torch.zeros(len(tokens_T), 264)
    models = [alive] * answers + [WorkerDiedError("llama.cpp ended with SIGKILL")]
    monkeypatch.setattr(gguf_file, "PROBES", ())  # of the tokenizer
    monkeypatch.setattr(llama_cpp, "is_installed", lambda: True)
    monkeypatch.setattr(llama_cpp, "LlamaCppModel", Mock(side_effect=models))
    with pytest.raises(VerificationError, match=r"SIGKILL The .* export is kept as .*out_"):
        write()
    assert (tmp_path / "out_unverified/model-f32.gguf").is_file()


# --- number formats -----------------------------------------------------------------------------


def stored_rows(path, rows, stored):
    spec = TensorSpec(name="x", shape=tuple(rows.shape), stored=stored, make=lambda: rows)
    write_gguf(path, "llama", {"general.type": "model"}, [spec])
    return GgufFile(path)


@pytest.mark.parametrize(
    ("stored", "bits", "most"),
    [
        *(("F32", 32, 0.0), ("F16", 16, 2**-11), ("BF16", 16, 2**-8)),
        *(("Q8_0", 8.5, 0.01), ("Q4_0", 4.5, 0.15)),
    ],
)
@pytest.mark.parametrize("scale", [1e-2, 300.0])
def test_values_come_back_with_the_error_of_their_format(stored, bits, most, scale, tmp_path):
    rows = torch.randn(64, 96, generator=torch.Generator().manual_seed(1)) * scale
    rows[0] = 0.0
    file = stored_rows(tmp_path / "x.gguf", rows, stored)
    assert file.tensors["x"].data.nbytes == rows.numel() * bits / 8
    assert most / 10 <= float((file.tensor("x") - rows).square().mean().sqrt()) / scale <= most


def test_what_float16_cannot_hold_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"as F16: 70000 .*Choose --gguf-type bf16"):
        stored_rows(tmp_path / "x.gguf", torch.full((1, 32), 70000.0), "F16")
