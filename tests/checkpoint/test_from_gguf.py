"""A GGUF file as the dense model: what is read of it, where it is kept, and what is refused."""

import json
import os
import re
import shutil
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, GGUFReader, GGUFWriter, dequantize, get_tensor_name_map
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from dotmoe.common.errors import UserError
from dotmoe.export import llama_cpp
from dotmoe.models.hf_config import rope_of
from dotmoe.models.identity import fingerprint
from dotmoe.models.read_config import dense_config
from dotmoe.models.source import checkpoint_folder
from export.comparison import logits_of
from runs import TINY_CONVERT, TINY_FINETUNE, loaded, refusal, rope


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """The folder in which checkpoints made of GGUF files are kept."""
    monkeypatch.setattr(llama_cpp, "is_installed", lambda: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/dotmoe"


@pytest.fixture
def gguf_of(exported, tmp_path):
    """Writes a model as GGUF, dense unless another format is named."""

    def write(dense, type="f32", name="gguf_dense", tokenizer="auto"):
        dense = replace(dense, tokenizer=with_a_merge(dense.tokenizer))
        out, options = f"out-{len(list(tmp_path.iterdir()))}", {"gguf_tokenizer": tokenizer}
        made = exported(dense, {"num_experts": 4}, out=out, format=name, gguf_type=type, **options)
        return (made.folder / made.record.files[0]).replace(tmp_path / "model.gguf")

    return write


def with_a_merge(tokenizer, *, digits=False):
    """A byte-level tokenizer that joins 1 and 2 as token 258, unless every digit stands alone."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    if parts["model"]["merges"]:
        return tokenizer
    parts["model"]["vocab"]["12"] = 258
    parts["model"]["merges"] = [["1", "2"]]
    cuts = [{"type": "Digits", "individual_digits": True}] * digits
    cuts += [{**parts["pre_tokenizer"], "use_regex": True}]
    parts["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": cuts}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(parts)),
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
    )


def require_same_logits(dense, file, tokens_BT):
    """What is read of a file computes what a model does; returns it."""
    read = loaded(file)
    expected, found = (logits_of(each.model, tokens_BT) for each in (dense, read))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    return read


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *(("llama", {}), ("llama", {"tied": True}), ("mistral", {"sliding_window": None})),
        ("qwen3", {"tied": True, "head_dim": 128}),
    ],
)
def test_the_model_and_its_tokenizer_are_those_that_the_file_was_made_of(
    family, options, dense_of, gguf_of, tokens_BT
):
    dense = dense_of(family, **options)
    file = gguf_of(dense)
    read = require_same_logits(dense, file, tokens_BT)
    text, stock = "Two  spaces,\n 3.12 and an é.</s>", with_a_merge(dense.tokenizer)
    assert 258 in read.tokenizer(text)["input_ids"]
    assert read.tokenizer(text)["input_ids"] == stock(text)["input_ids"]
    assert (read.source, read.revision) == (str(file), None)


@pytest.mark.parametrize(
    ("type", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float32), ("q8_0", torch.float32)]
)
def test_weights_are_stored_as_narrowly_as_holds_them_exactly(type, dtype, dense_of, gguf_of):
    file = gguf_of(dense_of("llama", dtype="bfloat16" if type == "bf16" else "float32"), type)
    assert dense_config(str(file))[0].dtype == dtype
    weights = load_file(checkpoint_folder(str(file)) / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {dtype}
    stored = {tensor.name: tensor for tensor in GGUFReader(file).tensors}["blk.1.ffn_down.weight"]
    numbers = torch.from_numpy(dequantize(stored.data, stored.tensor_type))
    assert torch.equal(weights["model.layers.1.mlp.down_proj.weight"].float(), numbers)


def test_digits_are_cut_as_the_rule_in_the_file_says(dense_of, gguf_of):
    tokenizer = with_a_merge(dense_of("llama").tokenizer, digits=True)
    file = gguf_of(replace(dense_of("llama"), tokenizer=tokenizer))
    read = loaded(file).tokenizer
    assert 258 not in read("a 12 b")["input_ids"]
    assert read("a 12 b")["input_ids"] == tokenizer("a 12 b")["input_ids"]


def write_gguf(path, architecture, model=None, keys=None, lacking=()):
    """A file by the gguf package alone, as llama.cpp's converter writes Qwen2.

    `keys` are further ones of the architecture, `lacking` names those that are left out.
    """
    writer = GGUFWriter(path, architecture)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*sorted(ByteLevel.alphabet()), "12", *"abcdefg"])
    writer.add_token_merges(["1 2"])
    if model is not None:
        config = model.config
        values = {
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
            "block_count": config.num_hidden_layers,
            "feed_forward_length": config.intermediate_size,
            "attention.head_count": config.num_attention_heads,
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            "rope.freq_base": rope_of(config)["rope_theta"],
            **(keys or {}),
        }
        for key, value in values.items():
            kind = {int: "uint32", float: "float32", str: "string", bool: "bool"}[type(value)]
            if key not in lacking:
                getattr(writer, f"add_{kind}")(f"{architecture}.{key}", value)
    if model is not None and architecture == "qwen2":
        names = get_tensor_name_map(MODEL_ARCH.QWEN2, config.num_hidden_layers)
        for name, tensor in model.state_dict().items():
            writer.add_tensor(names.get_name(name, (".weight", ".bias")), tensor.numpy())
    if model is not None and architecture != "qwen2":  # of the others only keys are read
        for layer in range(values["block_count"]):
            writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_biases_of_qwen2_are_read(dense_of, tokens_BT, tmp_path):
    dense = dense_of("qwen2")
    write_gguf(tmp_path / "model.gguf", "qwen2", dense.model)
    require_same_logits(dense, tmp_path / "model.gguf", tokens_BT)


@pytest.mark.parametrize(
    ("family", "options", "arch", "keys", "lacking", "words"),
    [
        ("phi3", {}, "phi3", {"attention.sliding_window": 64}, (), "sliding_window.* is 64"),
        ("phi3", {}, "phi3", {"rope.dimension_count": 12}, (), r"rope\.dimension_count .* is 12"),
        ("qwen2", {}, "qwen2", {"attention.scale": 0.5}, (), r"attention\.scale \(0\.5\), which"),
        ("qwen2", {}, "qwen2", {"logit_scale": 2.0}, (), "logit_scale"),
        ("qwen2", {}, "qwen2", {"attention.key_length": 32}, (), "key_length .* is 32.* reads 16"),
        ("qwen2", {}, "qwen2", {"attention.causal": False}, (), "causal .* is False"),
        ("qwen2", {}, "qwen2", {"rope.scaling.attn_factor": 2.0}, (), "attn_factor .* is 2"),
        ("qwen2", {}, "qwen2", {"rope.scale_linear": 4.0}, (), "scale_linear .* is 4"),
        ("qwen2", {}, "qwen2", {}, ("attention.head_count",), "lacks the key qwen2.*head_count"),
        ("qwen2", {}, "qwen2", {}, ("block_count",), "lacks the key qwen2.block_count"),
        ("qwen2", {}, "qwen2", {}, ("attention.layer_norm_rms_epsilon",), "lacks the key qwen2"),
        ("qwen2", {}, "qwen2", {}, ("attention.head_count_kv",), "not there, which means 4"),
        ("gemma2", {}, "gemma2", {"attention.key_length": 16}, (), r"1 / sqrt\(16\).* reads 256"),
        (
            "gemma2",
            {"head_dim": 256},
            "gemma2",
            {"attention.key_length": 256, "block_count": 46},
            (),
            r"1 / sqrt\(16\).* reads 256",  # hidden_size / heads, as in Gemma 2 27B
        ),
        (
            "gemma3_text",
            {"head_dim": 256},
            "gemma3",
            {"attention.key_length": 256, "final_logit_softcapping": 20.0},
            (),
            "final_logit_softcapping .* is 20",
        ),
    ],
)
def test_keys_that_transformers_does_not_read_are_refused(
    family, options, arch, keys, lacking, words, dense_of, tmp_path
):
    file = tmp_path / "model.gguf"
    write_gguf(file, arch, dense_of(family, **options).model, keys, lacking)
    for read in (dense_config, checkpoint_folder):  # of inspect and of the others
        said = refusal(read, str(file))
        assert re.search(words, said), said


@pytest.mark.parametrize(
    "keys",
    [
        {"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 16},
        {"attention.sliding_window": 4096, "attention.causal": True, "expert_count": 0},
        {"rope.scaling.type": "none", "rope.scaling.original_context_length": 64},
    ],
)
def test_keys_that_change_nothing_are_harmless(keys, dense_of, tokens_BT, tmp_path):
    dense = dense_of("qwen2")
    write_gguf(tmp_path / "model.gguf", "qwen2", dense.model, keys)
    require_same_logits(dense, tmp_path / "model.gguf", tokens_BT)


@pytest.mark.parametrize(
    ("family", "options", "arch", "keys"),
    [
        ("phi3", {}, "phi3", {"rope.scaling.original_context_length": 64}),
        ("qwen3", {"head_dim": 128}, "qwen3", {"attention.key_length": 128}),
        ("gemma2", {"head_dim": 256}, "gemma2", {"attn_logit_softcapping": 50.0}),
        ("gemma3_text", {"head_dim": 256}, "gemma3", {"rope.freq_base": 1e6}),
    ],
)
def test_keys_that_llama_cpp_writes_are_read(family, options, arch, keys, dense_of, tmp_path):
    """As in its files of Phi-3, Qwen3, Gemma 2 and Gemma 3 1B."""
    model, file = dense_of(family, **options).model, tmp_path / "model.gguf"
    if "gemma" in arch:
        keys = keys | {"attention.key_length": 256, "attention.value_length": 256}
        keys |= {"attention.sliding_window": 64}
    write_gguf(file, arch, model, keys)
    config = dense_config(str(file))[0]
    assert (config.model_type, config.num_hidden_layers) == (family, 2)
    if "gemma" in arch:
        assert config.sliding_window == 64


def test_files_beside_a_gguf_replace_none_of_its_parts(dense_of, gguf_of, cache, tmp_path):
    file = gguf_of(dense_of("llama")).rename(tmp_path / "model.GGUF")
    text = "a 12 b"
    alone = loaded(file).tokenizer(text)["input_ids"]
    shutil.rmtree(cache)
    other = with_a_merge(dense_of("llama").tokenizer, digits=True)
    other.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    read = loaded(file)
    assert read.tokenizer(text)["input_ids"] == alone != other(text)["input_ids"]
    assert read.config.model_type == "llama"
    texts = [each.read_text() for each in read.folder.glob("*.json")]
    assert not any("model.gguf" in each or "/tmp" in each for each in texts)


def test_the_cache_knows_what_made_a_folder(dense_of, gguf_of, monkeypatch):
    file = gguf_of(dense_of("llama"))
    first = checkpoint_folder(str(file))
    with monkeypatch.context() as patch:
        for name in ("in_turn", "cached_in"):  # a cache that is read-only cannot be locked
            patch.setattr(f"dotmoe.models.from_gguf.{name}", None)
        assert checkpoint_folder(str(file)) == first
    monkeypatch.setattr("dotmoe.models.from_gguf.version", lambda name: f"another {name}")
    assert checkpoint_folder(str(file)) != first


def test_a_folder_that_a_run_may_read_stays_for_a_week_when_its_file_changes(dense_of, gguf_of):
    dense = dense_of("llama")
    first, second = (checkpoint_folder(str(gguf_of(dense, type))) for type in ("f32", "q8_0"))
    assert first != second
    assert first.is_dir()
    os.utime(first, (0, 0))
    third = checkpoint_folder(str(gguf_of(dense, "f16")))
    assert second.is_dir()
    assert third.is_dir()
    assert not first.exists()


def test_a_model_of_a_file_is_the_same_by_any_version_of_transformers(dense_of, gguf_of):
    """Its fingerprint is what a run is known by."""
    file, versions = gguf_of(dense_of("llama")), ("5.24.0", "5.99.0")
    seen = set()
    for number in versions:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("transformers.configuration_utils.__version__", number)
            patch.setattr("transformers.generation.configuration_utils.__version__", number)
            folder = checkpoint_folder(str(file))
            seen.add(fingerprint(folder))
        shutil.rmtree(folder.parent)
    assert len(seen) == 1


def test_a_sentencepiece_tokenizer_cuts_as_before(shared_data, gguf_of):
    dense = loaded(shared_data / "models/stories260K")
    read = loaded(gguf_of(dense)).tokenizer
    for text in ("Once upon a time, Lily said: 12 cats!\n", "Two  spaces and an é 🙂.<s>"):
        assert read(text)["input_ids"] == dense.tokenizer(text)["input_ids"]


def test_a_gguf_file_is_converted_finetuned_and_measured_as_a_folder_is(
    dense_of, gguf_of, text_file, command, cache, tmp_path, monkeypatch, caplog
):
    file, run = gguf_of(dense_of("llama"), "q8_0"), tmp_path / "run"
    made = command("convert", file, run, data=text_file, **TINY_CONVERT)
    assert made.status == 0, made.err
    (folder,) = (path for path in cache.glob("*") if (path / "model.safetensors").exists())
    assert caplog.text.count(f"converted to {folder}") == 1
    assert json.loads((run / "5_export/dotmoe.json").read_text())["source"] == file.name
    changed = (folder / "model.safetensors").stat().st_mtime_ns
    assert command("finetune", run, tmp_path / "tuned", **TINY_FINETUNE).status == 0
    assert json.loads(command("inspect", file, expert_size=8, json=[]).out)["stored_dtype"]
    text = {"text": text_file, "max_tokens": 512, "window": 64}
    by_name = [command("evaluate", it, json=[], **text).out for it in (file, folder)]
    assert len({json.loads(said)["loss"] for said in by_name}) == 1
    assert command("evaluate", run, fidelity=[], **text).status == 0
    monkeypatch.setattr(
        "dotmoe.measure.bench.Worker", begun := Mock(side_effect=UserError("begun"))
    )
    short = {"prompt_tokens": 8, "context_tokens": 8}
    assert "begun" in command("bench", file, run, **short).refusal()
    assert begun.call_args.kwargs["name"] == f"transformers on {folder}"
    assert (folder / "model.safetensors").stat().st_mtime_ns == changed


@pytest.mark.parametrize(
    ("family", "options", "written", "reason"),
    [
        ("llama", {}, {"name": "gguf_glm4moe"}, "mixture of 4 experts"),
        ("llama", {}, {"tokenizer": "none"}, "no tokenizer"),
        ("llama", rope("linear", factor=2.0), {}, "scaled rotary frequencies"),
        ("qwen2", {}, {}, "reads only part of"),  # written as a llama with biases
    ],
)
def test_what_transformers_would_misread_is_refused(
    family, options, written, reason, dense_of, gguf_of, cache
):
    file = gguf_of(dense_of(family, **options), **written)
    with pytest.raises(UserError, match=reason):
        checkpoint_folder(str(file))
    assert not list(cache.glob("*/model.safetensors"))


def test_transformers_is_told_to_dequantise(dense_of, gguf_of, monkeypatch):
    """From 5.24 on it can keep blocks: not yet of these families, nor without a kernel for them."""
    quantizer = pytest.importorskip("transformers.quantizers.quantizer_gguf").GgufHfQuantizer
    told, update = [], quantizer.update_device_map

    def watched(self, device_map):
        told.append(self.quantization_config.dequantize)
        return update(self, device_map)

    monkeypatch.setattr(quantizer, "update_device_map", watched)
    checkpoint_folder(str(gguf_of(dense_of("llama"), "q8_0")))
    assert told == [True]


def test_a_part_of_a_model_is_named_as_one(tmp_path):
    path = tmp_path / "model-00001-of-00003.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"one of 3 parts of a model\. .*llama-gguf-split --merge"):
        checkpoint_folder(str(path))


def test_a_file_in_place_of_another_is_read_anew(dense_of, gguf_of):
    file = gguf_of(dense_of("llama"))
    weights = [load_file(checkpoint_folder(str(file)) / "model.safetensors")]
    gguf_of(dense_of("llama", tied=True))
    weights.append(load_file(checkpoint_folder(str(file)) / "model.safetensors"))
    assert weights[0].keys() - weights[1].keys() == {"lm_head.weight"}


def test_a_file_whose_content_alone_has_changed_is_read_anew(dense_of, gguf_of):
    file = gguf_of(dense_of("llama"))
    first, stat = loaded(file).folder, file.stat()
    content = bytearray(file.read_bytes())
    content[-4:] = bytes(4)
    file.write_bytes(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert loaded(file).folder != first


def test_files_that_are_none_are_refused(command, tmp_path, monkeypatch):
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF" + bytes(9))
    assert "Get it again" in command("inspect", tmp_path / "damaged.gguf").refusal()
    assert "does not exist" in command("inspect", "nowhere.gguf").refusal()
    write_gguf(tmp_path / "unknown.gguf", "martian")
    assert "architecture martian" in command("inspect", tmp_path / "unknown.gguf").refusal()
    monkeypatch.setattr("dotmoe.common.errors.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"'.\[gguf\]'"):
        checkpoint_folder(str(tmp_path / "unknown.gguf"))
