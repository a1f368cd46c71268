import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from dotmoe.errors import UserError
from dotmoe.export import ExportConfig, export, export_dtype
from dotmoe.load import LoadConfig, load_dense
from dotmoe.moe.surgery import masked_by

GQA_WIDE_HEADS = {"head_dim": 24, "num_key_value_heads": 1}
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
YARN_ROPE = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
}
CASES = [
    (family, dtype, tied)
    for family in ("llama", "mistral", "qwen2", "qwen3")
    for dtype in ("float32", "bfloat16")
    for tied in (False, True)
]


def stored_tensors(folder):
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


def logits_by_transformers(folder, tokens, **overrides):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **overrides)
    with torch.no_grad():
        return model(input_ids=tokens).logits


def relative_error(actual, reference):
    # Of the median token: a near-tie that falls the other way changes all later tokens of its row.
    per_token = (actual - reference).abs().mean(dim=-1).flatten()
    return float(per_token.median() / reference.std())


@pytest.mark.parametrize(("family", "dtype", "tied"), CASES)
def test_every_family_dtype_and_tying_verifies(
    family, dtype, tied, dense_of, layout_of, tokens_BT, tmp_path, record_property
):
    dense = dense_of(family, dtype=dtype, tied=tied)
    layout = layout_of(dense, dtype=getattr(torch, dtype))
    record = export(dense, layout, tmp_path / "out", ExportConfig(), tokens_BT)
    check = record.verification
    assert check.dtype == dtype
    assert check.loaded_class.startswith("transformers.models.glm4_moe.")
    # Shown in the JUnit report: how far from the limits each case is.
    record_property("block_error", max(layer.block_error for layer in check.layers))
    record_property("block_tail", max(layer.block_error_tail for layer in check.layers))
    record_property("logits_error", check.logits_error)
    record_property("dense_error", check.dense_error)
    record_property("floor", check.logits_floor)
    assert all(0.5 < scale.logit_std < 4 for scale in record.routers)
    assert all(scale.gate_deviation < 2**-8 for scale in record.routers)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_expert_weights_are_the_dense_rows_bit_for_bit(
    dtype, dense_of, layout_of, tokens_BT, tmp_path
):
    dense = dense_of("qwen2", dtype=dtype)  # held in float32, exported as stored
    layout = layout_of(dense, dtype=getattr(torch, dtype))
    export(dense, layout, tmp_path / "out", ExportConfig(), tokens_BT)
    before, after = stored_tensors(dense.folder), stored_tensors(tmp_path / "out")
    for layer in range(layout.num_layers):
        prefix = f"model.layers.{layer}.mlp"
        for expert in range(layout.num_experts):
            neurons = layout.neurons_of_expert(layer)[expert]
            for name in ("gate", "up", "down"):
                rows = before[f"{prefix}.{name}_proj.weight"]
                expected = rows[:, neurons] if name == "down" else rows[neurons]
                actual = after[f"{prefix}.experts.{expert}.{name}_proj.weight"]
                assert actual.dtype == getattr(torch, dtype)
                assert torch.equal(actual, expected)
    carried = [name for name in before if ".mlp." not in name]
    assert len(carried) > 10
    assert all(torch.equal(before[name], after[name]) for name in carried)


@pytest.mark.parametrize("active_experts", [1, 7, 12])
def test_k_edited_in_the_config_gives_the_masked_model_with_that_k(
    active_experts, dense_of, layout_of, tokens_BT, tmp_path
):
    dense = dense_of("llama")
    layout = layout_of(dense, active_experts=3)
    out = tmp_path / "out"
    export(dense, layout, out, ExportConfig(), tokens_BT)
    config = json.loads((out / "config.json").read_text())
    config["num_experts_per_tok"] = active_experts
    (out / "config.json").write_text(json.dumps(config))
    with torch.no_grad(), masked_by(dense, layout.with_active_experts(active_experts)):
        reference = dense.model(input_ids=tokens_BT).logits
    assert relative_error(logits_by_transformers(out, tokens_BT), reference) < 1e-3


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_all_experts_on_is_the_dense_model(family, dense_of, layout_of, tokens_BT, tmp_path):
    dense = dense_of(family, tied=True, **GQA_WIDE_HEADS if family != "qwen2" else {})
    layout = layout_of(dense)
    out = tmp_path / "out"
    export(dense, layout, out, ExportConfig(), tokens_BT)
    with torch.no_grad():
        reference = dense.model(input_ids=tokens_BT).logits
    full = logits_by_transformers(out, tokens_BT, num_experts_per_tok=layout.num_experts)
    assert relative_error(full, reference) < 1e-3


@pytest.mark.parametrize("rope", [LLAMA3_ROPE, YARN_ROPE], ids=["llama3", "yarn"])
def test_scaled_rotary_embeddings_survive(rope, dense_of, layout_of, tokens_BT, tmp_path):
    dense = dense_of("llama", num_key_value_heads=1, **rope)
    export(dense, layout_of(dense), tmp_path / "out", ExportConfig(), tokens_BT)
    config = json.loads((tmp_path / "out/config.json").read_text())
    expected = rope["rope_parameters"]
    assert config["rope_theta"] == expected["rope_theta"]
    assert config["rope_scaling"]["factor"] == expected["factor"]
    assert config["rope_scaling"]["original_max_position_embeddings"] < 256
    assert config["rope_parameters"]["partial_rotary_factor"] == 1.0


@pytest.mark.parametrize(
    ("family", "window"),
    [
        ("mistral", {"sliding_window": 40}),
        ("qwen3", {"sliding_window": 40, "use_sliding_window": True, "max_window_layers": 1}),
    ],
)
def test_a_sliding_window_becomes_the_context_limit(
    family, window, dense_of, layout_of, tokens_BT, tmp_path
):
    dense = dense_of(family, **window)
    layout = layout_of(dense)
    record = export(dense, layout, tmp_path / "out", ExportConfig(), tokens_BT)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["max_position_embeddings"] == 40
    assert any("sliding window of 40" in note for note in record.notes)
    short = tokens_BT[:, :40]
    with torch.no_grad(), masked_by(dense, layout):
        reference = dense.model(input_ids=short).logits
        longer = dense.model(input_ids=tokens_BT).logits
    assert relative_error(logits_by_transformers(tmp_path / "out", short), reference) < 1e-3
    # The limit is needed: beyond the window the two models differ.
    assert relative_error(logits_by_transformers(tmp_path / "out", tokens_BT), longer) > 0.02


def test_a_tied_checkpoint_that_stores_only_the_head_exports(
    dense_of, layout_of, tokens_BT, tmp_path
):
    dense = dense_of("llama", head_only=True)
    export(dense, layout_of(dense), tmp_path / "out", ExportConfig(), tokens_BT)
    after = stored_tensors(tmp_path / "out")
    assert torch.equal(after["lm_head.weight"], after["model.embed_tokens.weight"])
    assert torch.equal(after["lm_head.weight"], stored_tensors(dense.folder)["lm_head.weight"])


def test_config_carries_old_and_new_keys(dense_of, layout_of, tokens_BT, tmp_path):
    dense = dense_of("qwen2", tied=True, dtype="bfloat16")
    layout = layout_of(dense, dtype=torch.bfloat16)
    export(dense, layout, tmp_path / "out", ExportConfig(), tokens_BT)
    config = json.loads((tmp_path / "out/config.json").read_text())
    expected = {
        "architectures": ["Glm4MoeForCausalLM"],
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "norm_topk_prob": False,
        "routed_scaling_factor": 2.0,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 0,
        "num_nextn_predict_layers": 0,
        "partial_rotary_factor": 1.0,
        "attention_bias": True,
        "use_qk_norm": False,
        "head_dim": 16,
        "rope_scaling": None,
        "eos_token_id": dense.config.eos_token_id,
        "max_position_embeddings": 256,
    }
    assert {key: config[key] for key in expected} == expected
    assert config["rope_parameters"]["rope_theta"] == config["rope_theta"]
    bias = stored_tensors(tmp_path / "out")["model.layers.0.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == torch.float32


def test_the_folder_is_complete_and_small_shards_load(dense_of, layout_of, tokens_BT, tmp_path):
    dense = dense_of("mistral")
    shutil.copytree(dense.folder, tmp_path / "dense")
    generation = {"bos_token_id": 0, "eos_token_id": 1, "max_new_tokens": 7}
    (tmp_path / "dense/generation_config.json").write_text(json.dumps(generation))
    dense = load_dense(str(tmp_path / "dense"), LoadConfig(device="cpu"))
    out = tmp_path / "made/below/out"
    config = ExportConfig(max_shard_gib=40_000 / 2**30)
    record = export(dense, layout_of(dense), out, config, tokens_BT)
    assert len(record.files) > 3
    assert record.files[0] == f"model-00001-of-{len(record.files):05d}.safetensors"
    assert all((out / name).is_file() for name in record.files)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    tensors = stored_tensors(out)
    assert set(index["weight_map"]) == set(tensors)
    assert record.total_bytes == sum(t.numel() * t.element_size() for t in tensors.values())
    assert GenerationConfig.from_pretrained(out).max_new_tokens == 7
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer("three crows").input_ids == dense.tokenizer("three crows").input_ids
    stored = json.loads((out / "dotmoe.json").read_text())
    assert stored.pop("sha256")
    assert stored == json.loads(json.dumps(record.as_dict()))
    assert stored["routers"][1]["exponent"] == record.routers[1].exponent


def test_the_export_loads_where_dotmoe_cannot_be_imported(dense_of, layout_of, tokens_BT, tmp_path):
    dense = dense_of("qwen3")
    export(dense, layout_of(dense), tmp_path / "out", ExportConfig(), tokens_BT)
    program = """
import sys
sys.modules["dotmoe"] = None  # makes every import of it fail, installed or not
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
prompt = AutoTokenizer.from_pretrained(sys.argv[1])("Once", return_tensors="pt").input_ids
made = model.generate(prompt, max_new_tokens=5, min_new_tokens=5, do_sample=False)
assert made.shape[1] == prompt.shape[1] + 5
print(type(model).__name__)
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", program, str(tmp_path / "out")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["Glm4MoeForCausalLM"]


def test_more_layers_than_glm_has_are_all_loaded(dense_of, layout_of, tokens_BT, tmp_path):
    # Transformers ignores surplus tensors of layers 46 and 92 of glm4_moe; ours are not surplus.
    dense = dense_of("llama", num_hidden_layers=48, intermediate_size=32)
    layout = layout_of(dense, num_experts=4, active_experts=4)
    record = export(
        dense, layout, tmp_path / "out", ExportConfig(scale_tokens=64, verify_tokens=64), tokens_BT
    )
    assert len(record.verification.layers) == 48


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_real_checkpoint_verifies(dtype, shared_data, layout_of, tmp_path):
    folder = shared_data / "models/stories260K"
    if not folder.is_dir():
        pytest.skip(f"no checkpoint at {folder}")
    dense = load_dense(str(folder), LoadConfig(device="cpu"))
    text = "Once upon a time, there was a little girl named Lily. She loved to play outside. " * 20
    ids = torch.tensor(dense.tokenizer(text).input_ids[:512]).view(2, 256)
    # bfloat16 needs expert sizes that are multiples of 8, and 172 neurons have no such divisor.
    layout = layout_of(dense, num_experts=43, active_experts=11)
    config = ExportConfig(export_dtype=dtype)
    if dtype == "bfloat16":
        with pytest.raises(UserError, match="multiples of 8"):
            export(dense, layout, tmp_path / "out", config, ids)
        return
    record = export(dense, layout, tmp_path / "out", config, ids)
    stored = stored_tensors(folder).values()
    assert record.parameters["dense"] == sum(tensor.numel() for tensor in stored)
    assert record.verification.top1_agreement >= 0.99


def test_bfloat16_weights_can_be_asked_for(dense_of, layout_of, tokens_BT, tmp_path):
    dense = dense_of("llama")
    layout = layout_of(dense, dtype=torch.bfloat16)
    config = ExportConfig(export_dtype="bfloat16")
    assert export_dtype(dense, config) == torch.bfloat16
    record = export(dense, layout, tmp_path / "out", config, tokens_BT)
    assert record.verification.dtype == "bfloat16"
    assert {t.dtype for n, t in stored_tensors(tmp_path / "out").items() if "bias" not in n} == {
        torch.bfloat16
    }
