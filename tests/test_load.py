import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dotmoe.common.errors import UserError
from dotmoe.models.checkpoint import Tensors, tensor_files
from dotmoe.models.config import LoadConfig
from dotmoe.models.family import FAMILIES
from dotmoe.models.load import describe_dense, dtype_for, left_on_disk, load_dense, load_weights
from dotmoe.models.read_config import dense_config
from runs import in_turn, put_into, refusal, rewritten

GATE = "model.layers.0.mlp.gate_proj.weight"
UP = "model.layers.1.mlp.up_proj.weight"
INDEX = "model.safetensors.index.json"


def with_config(name="config.json", **changes):
    return lambda folder: put_into(folder / name, **changes)


def with_text(name, text):
    return lambda folder: (folder / name).write_text(text)


def without(name):
    return lambda folder: (folder / name).unlink()


def with_tensors(edit, name="model.safetensors"):
    def change(folder):
        with rewritten(folder, name) as tensors:
            edit(tensors)

    return change


def in_shards(folder):
    """Splits model.safetensors, as hub checkpoints are; gives the file of each tensor."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="200KB")
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(weight_map.values())) > 1
    return weight_map


def refusal_of(source, **options):
    return refusal(load_dense, str(source), LoadConfig(**options))


@pytest.mark.parametrize(("family_name", "tied"), in_turn(FAMILIES, (False, True)))
def test_weights_are_those_of_the_file_bit_for_bit(tiny_dense, family_name, tied):
    folder = tiny_dense(family_name, tied=tied)
    dense = load_dense(str(folder), LoadConfig())
    stored = load_file(folder / "model.safetensors")
    loaded = dense.model.state_dict()
    assert all(torch.equal(loaded[name], stored[name]) for name in stored)
    assert set(loaded) - set(stored) == ({"lm_head.weight"} if tied else set())
    assert dense.family is FAMILIES[family_name]
    assert (dense.folder, dense.source, dense.revision) == (folder, str(folder), None)
    assert not any(parameter.requires_grad for parameter in dense.model.parameters())
    assert not any(module.training for module in dense.model.modules())
    kernel = "sdpa" if type(dense.model)._supports_sdpa else "eager"
    assert dense.model.config._attn_implementation == kernel


def test_a_tied_checkpoint_that_stores_only_the_head_is_the_same_model(tiny_dense):
    folder = tiny_dense("llama", head_only=True)
    ours = load_dense(str(folder), LoadConfig()).model
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert torch.equal(ours.model.embed_tokens.weight, head)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    tokens = torch.arange(2, 34).view(2, 16)
    assert torch.equal(ours(input_ids=tokens).logits, theirs(input_ids=tokens).logits)


def test_dtype_auto_is_float32_on_a_cpu_and_an_explicit_one_is_kept(tiny_dense):
    source = str(tiny_dense("llama", dtype="bfloat16"))
    stored = load_file(Path(source) / "model.safetensors")[GATE]
    assert stored.dtype == torch.bfloat16
    for name, expected in (("auto", torch.float32), ("float16", torch.float16)):
        model = load_dense(source, LoadConfig(dtype=name, device="cpu")).model
        weight = model.state_dict()[GATE]
        assert weight.dtype == expected
        assert torch.equal(weight, stored.to(expected))


def test_shards_load_as_the_single_file_does(copied):
    whole = load_dense(str(copied), LoadConfig()).model.state_dict()
    weight_map = in_shards(copied)
    split = load_dense(str(copied), LoadConfig()).model.state_dict()
    assert all(torch.equal(whole[name], split[name]) for name in whole)
    assert tensor_files(copied) == {name: copied / file for name, file in weight_map.items()}


def test_config_alone_needs_no_weights(copied):
    (copied / "model.safetensors").unlink()
    (copied / "tokenizer.json").unlink()
    with_config(quantization_config=None)(copied)
    config, folder = dense_config(str(copied))
    assert (config.model_type, config.intermediate_size, folder) == ("llama", 96, copied)


def test_refuses_a_missing_folder_and_proposes_its_neighbour(copied):
    message = refusal_of(copied.parent / "modle")
    assert message.startswith(f"{copied.parent}/modle does not exist.")
    assert f"Did you mean {copied}?" in message
    assert "is a file" in refusal_of(copied / "config.json")
    assert "~no-such-user/model does not exist" in refusal_of("~no-such-user/model")
    message = refusal_of("nobody-at-all/no-such-model")
    assert re.search(
        "^nobody-.*/no-such-model is no local folder.*Check the name and the net", message
    )


BEFORE_WEIGHTS = [
    (without("config.json"), "holds no config.json"),
    (with_text("config.json", "{not json"), "config.json is not JSON"),
    (with_text("config.json", "[1, 2]"), "config.json must hold one JSON object"),
    (with_text("config.json", '{"hidden_size": 8}'), "names no model_type"),
    (with_config(model_type=["llama"]), "model_type is .*'llama'.*which dotmoe cannot convert"),
    (with_config(hidden_act="relu"), "hidden_act is 'relu'"),
    (with_config(hidden_size="wide"), "is no valid llama config"),
    (with_config(hidden_size=65), "not a multiple of the number of attention heads"),
    (with_config(num_attention_heads=0), "is no valid llama config"),
    (with_config(dtype="bf16"), "is no valid llama config .*'bf16'"),
    (with_config(quantization_config={"quant_method": "gptq"}), "Choose the unquantised check"),
    (lambda folder: None, "holds no model.safetensors"),
    (with_text(INDEX, '{"weight_map": {"x": 3}, "metadata": {}}'), "has no weight_map"),
    (with_text(INDEX, '{"weight_map": ["x"], "metadata": {}}'), "has no weight_map"),
    (with_text(INDEX, '["weight_map"]'), "must hold one JSON object"),
]


@pytest.mark.parametrize(("damage", "expected"), BEFORE_WEIGHTS)
def test_a_config_that_cannot_be_converted_is_refused_before_reading_weights(
    copied, damage, expected
):
    (copied / "model.safetensors").unlink()
    damage(copied)
    assert re.search(expected, refusal_of(copied))


def cut_short(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-40])


def without_a_shard(folder):
    (folder / in_shards(folder)[GATE]).unlink()


def with_a_tensor_missing_from_its_shard(folder):
    with_tensors(lambda tensors: tensors.pop(GATE), in_shards(folder)[GATE])(folder)


def with_a_tensor_sent_to_another_shard(folder):
    weight_map = in_shards(folder)
    save_file({"unused": torch.ones(2)}, folder / "other.safetensors")
    with_text(INDEX, json.dumps({"weight_map": weight_map | {GATE: "other.safetensors"}}))(folder)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (
            without_a_shard,
            r"index\.json says that \S+ is in model-0000.-of-\S+, but there is no such file",
        ),
        (
            with_a_tensor_missing_from_its_shard,
            rf"index\.json says that {GATE} is in model-0000.-of-\S+, but it is in none of the f",
        ),
        (
            with_a_tensor_sent_to_another_shard,
            rf"index\.json says that {GATE} is in other\.safetensors, but it is in model-0000.-of",
        ),
        (cut_short, "model.safetensors is no valid safetensors file"),
        (with_text("model.safetensors", "version https://git-lfs.github.com/spec/v1"), "lfs pull"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "holds no model.safetensors .* pickles are not read.*save_pretrained",
        ),
        (with_tensors(lambda t: t.pop("lm_head.weight")), "no lm_head.weight.*tie_word_embeddings"),
        (with_tensors(lambda t: [t.pop(UP), t.pop(GATE)]), f"^{GATE} is missing from the saf"),
        (
            with_tensors(lambda t: t.update({GATE: torch.zeros(80, 64)})),
            rf"^{GATE} has shape \(80, 64\).*\(96, 64\)",
        ),
        (with_tensors(lambda t: t[GATE][20, 3].fill_(-torch.inf)), f"^{GATE} .* NaN or infinity"),
        # tokenizer_config.json stays: of it alone Transformers makes a tokenizer of three entries.
        (without("tokenizer.json"), "holds no tokenizer.json or tokenizer.model"),
        (with_text("tokenizer.json", "{"), "tokenizer.json is not JSON"),
        (with_config("tokenizer.json", pre_tokenizer={"type": "New"}), "in .* cannot be loaded"),
        (with_text("tokenizer_config.json", "[]"), "tokenizer in .* cannot be loaded"),
        (with_config(vocab_size=200), "ids up to 257.*200 rows"),
    ],
)
def test_damage_is_named(damage, expected, copied):
    damage(copied)
    assert re.search(expected, refusal_of(copied))


def unprefixed(tensors):
    for name in list(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)


@pytest.mark.parametrize("tied", [True, False])
def test_a_base_model_is_the_whole_one_if_no_head_is_missing(tiny_dense, tied, tmp_path):
    folder = shutil.copytree(tiny_dense("phi3", tied=tied), tmp_path / "base")
    prefixed = shutil.copytree(folder, tmp_path / "whole")
    model = AutoModelForCausalLM.from_pretrained(prefixed)
    if tied:
        model.model.save_pretrained(folder)  # Transformers writes no prefix
    else:
        with_tensors(unprefixed)(folder)
    assert "embed_tokens.weight" in load_file(folder / "model.safetensors")
    tokens_BT = torch.arange(2, 34).view(2, 16)
    for dense in (
        load_dense(str(folder), LoadConfig()),
        left_on_disk(describe_dense(str(folder)), LoadConfig()),
    ):
        logits = dense.model(input_ids=tokens_BT, use_cache=False).logits
        assert torch.equal(logits, model(input_ids=tokens_BT, use_cache=False).logits)
    ours, whole = (Tensors.of(describe_dense(str(each))) for each in (folder, prefixed))
    assert ours.names == whole.names
    name = "model.layers.1.mlp.up_proj.weight"  # some rows of a fused tensor
    assert torch.equal(ours.read(name), whole.read(name))


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_kernel_that_the_config_names_need_not_be_installed(copied, key):
    with_config(**{key: "flash_attention_2"})(copied)
    dense = load_dense(str(copied), LoadConfig())
    assert dense.model.config._attn_implementation == "sdpa"
    left_on_disk(dense, LoadConfig()).model(input_ids=torch.arange(2, 18)[None])


def test_overflow_in_float16_is_noticed(copied):
    with_tensors(lambda tensors: tensors[GATE].view(-1)[0].fill_(1e6))(copied)
    load_dense(str(copied), LoadConfig(dtype="float32"))
    assert "float16" in refusal_of(copied, dtype="float16")


@pytest.mark.parametrize(
    "edit", [lambda t: t.pop(GATE), lambda t: t.update({GATE: torch.zeros(80, 64)})]
)
def test_stock_transformers_leaves_no_weight_random(copied, edit):
    with_tensors(edit)(copied)
    with pytest.raises(UserError, match=GATE):
        load_weights(copied, torch.float32)
    with_config(hidden_act="relu")(copied)  # of no family, so Transformers loads it
    with pytest.raises(UserError, match=f"{GATE}.*1 such tensors.* random"):
        load_weights(copied, torch.float32)


@pytest.mark.parametrize(
    ("stored", "asked", "device", "dtype"),
    [
        ("float16", "auto", "cuda", torch.bfloat16),
        ("float16", "float16", "cuda", torch.float16),
        ("bfloat16", "auto", "cuda", torch.bfloat16),
        ("float16", "auto", "cpu", torch.float32),
    ],
)
def test_gradients_of_a_float16_checkpoint_do_not_underflow(
    tiny_dense, stored, asked, device, dtype
):
    dense = describe_dense(str(tiny_dense("llama", dtype=stored)))
    assert dtype_for(dense, LoadConfig(dtype=asked), torch.device(device)) == dtype


@pytest.mark.parametrize(
    "settings",
    [
        '{"eos_token_id": [1,',
        "",
        '{"eos_token_id": "x"}',
        '{"do_sample": false, "num_return_sequences": 2}',
        '{"cache_implementation": "none such"}',
    ],
)
def test_damaged_generation_settings_are_named(settings, tiny_dense, tmp_path):
    folder = shutil.copytree(tiny_dense("llama"), tmp_path / "model")
    (folder / "generation_config.json").write_text(settings)
    with pytest.raises(UserError) as caught:
        load_dense(str(folder), LoadConfig(dtype="float32"))
    assert f"{folder}/generation_config.json" in str(caught.value)
    assert "\n" not in str(caught.value)
