"""One folder means the same model to every command, or all refuse it in one line.

Oracles: stock Transformers on the folder that was not changed, and the texts of the refusals.
"""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import dotmoe
from dotmoe.models.load import describe_dense, load_weights
from export.comparison import logits_of
from runs import TINY_CONVERT, in_turn, loaded, put_into, refusal, rewritten

UP = "model.layers.1.mlp.up_proj.weight"
INDEX = "model.safetensors.index.json"


def test_one_function_of_the_package_lets_transformers_read_files():
    source = Path(dotmoe.__file__).parent
    texts = {path.relative_to(source).as_posix(): path.read_text() for path in source.rglob("*.py")}
    calls = {name: text.count(".from_pretrained(") for name, text in texts.items()}
    assert {name: count for name, count in calls.items() if count} == {"models/stock.py": 1}


@pytest.fixture
def commands(command, finished, text_file, tmp_path):
    """What each command that reads a model does with a folder: `(name, run)` pairs."""
    out = tmp_path / "out"
    text = {"text": text_file, "max_tokens": 256, "window": 64, "json": []}

    def run(name, folder):
        shutil.rmtree(out, ignore_errors=True)
        match name:
            case "inspect":
                return command("inspect", folder, expert_size=8, json=[])
            case "convert":
                return command("convert", folder, out, data=text_file, **TINY_CONVERT)
            case "compare":
                how = {"data": text_file, "expert_size": 8, "seq_len": 32}
                return command("compare", folder, out, eval_tokens=256, **how)
            case "text":
                return command("evaluate", folder, **text)
            case "generation":
                return command("evaluate", folder, generate=2, prompts="a", json=[])
            case "fidelity":
                return command("evaluate", finished.folder, against=folder, fidelity=[], **text)
            case "bench":
                return command("bench", folder, finished.folder)
            case "tasks":
                pytest.importorskip("lm_eval")
                rows = tmp_path / "rows/piqa"
                rows.mkdir(parents=True, exist_ok=True)
                row = {"goal": "a", "sol1": "b", "sol2": "c", "label": 1}
                (rows / "validation.jsonl").write_text(json.dumps(row) + "\n")
                how = {"task_data": tmp_path / "rows", "limit": 1, "out": tmp_path / "tasks"}
                return command("evaluate", folder, tasks="piqa", json=[], **how)
        raise AssertionError(name)

    return run


COMMANDS = ("inspect", "convert", "compare", "text", "generation", "fidelity", "bench", "tasks")


def tensor(name, *shape):
    def change(folder):
        with rewritten(folder) as tensors:
            tensors[name] = torch.ones(*shape)

    return change


def adapter(folder):
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')


def pruned(folder):
    with rewritten(folder) as tensors:
        for part, axis in (("gate", 0), ("up", 0), ("down", 1)):
            name = f"model.layers.1.mlp.{part}_proj.weight"
            tensors[name] = tensors[name].narrow(axis, 0, 80).clone()


def without_the_head(folder):
    with rewritten(folder) as tensors:
        del tensors["lm_head.weight"]


def in_shards(folder, *, stale=True):
    """Two files; the second has another copy of a tensor that the index sends to the first."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"model-{1 + (name > UP)}.safetensors" for name in names}
    for file in set(files.values()):
        held = {name: tensors[name] for name in names if files[name] == file}
        if file == "model-2.safetensors" and stale:
            held[UP] = -tensors[UP]
        save_file(held, folder / file, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))


def sent_to(shard):
    """Shards whose index sends a tensor of the first to another one."""

    def change(folder):
        in_shards(folder, stale=False)
        files = json.loads((folder / INDEX).read_text())["weight_map"]
        put_into(folder / INDEX, weight_map=files | {UP: shard})

    return change


def twice(folder):
    """The weights whole and in shards, as after saving a model over another."""
    tensors = load_file(folder / "model.safetensors")
    in_shards(folder, stale=False)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def only_a_gguf(folder):
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "Model.Q8_0.GGUF").write_bytes(b"GGUF")


def gguf_beside_a_config(folder):
    """As repositories of GGUF files have it."""
    (folder / "model.safetensors").rename(folder / "Model.Q8_0.GGUF")


def config(**values):
    return lambda folder: put_into(folder / "config.json", **values)


def own_code(folder):
    """Unknown to Transformers, with code that leaves a mark when it runs."""
    put_into(
        folder / "config.json",
        model_type="mine",
        auto_map={"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"},
    )
    (folder / "mine.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")


REFUSED = {
    "adapter": (adapter, r"adapter_config\.json.*peft"),
    "bias": (tensor("model.layers.0.self_attn.q_proj.bias", 64), r"q_proj\.bias is stored"),
    "norm": (tensor("model.layers.0.self_attn.q_norm.weight", 16), r"q_norm\.weight is stored"),
    "layer": (tensor("model.layers.2.mlp.up_proj.weight", 96, 64), r"layers\.2\.mlp.* is stored"),
    "lora": (
        tensor("model.layers.0.self_attn.q_proj.lora_A.weight", 2, 64),
        "adapter that is not merged.*merge_and_unload",
    ),
    "pruned": (pruned, "Layers of a pruned model differ in width"),
    "head": (without_the_head, "no lm_head.*tie_word_embeddings"),
    "stale": (in_shards, f"{UP} is stored twice, in .*model-1.*model-2"),
    "wrong shard": (
        sent_to("model-2.safetensors"),
        rf"index\.json says that {UP} is in model-2\.safetensors, but it is in model-1",
    ),
    "no shard": (
        sent_to("model-9.safetensors"),
        rf"index\.json says that {UP} is in model-9\.safetensors, but there is no such file",
    ),
    "two": (twice, "model.safetensors and model.safetensors.index.json.*Delete the one"),
    "tied": (config(tie_word_embeddings=True), "differ, but its config.json ties them"),
    "gguf": (only_a_gguf, r"but Model\.Q8_0\.GGUF. Name that file"),
    "gguf and config": (gguf_beside_a_config, r"but Model\.Q8_0\.GGUF. Name that file"),
    "code": (own_code, "mine"),
    "mrope": (config(rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]}), "'mrope'.*plain"),
    "text": (config(rope_scaling={"rope_type": "linear", "factor": "2.0"}), r"factor .* is '2\.0'"),
}


@pytest.mark.parametrize(("kind", "name"), in_turn(REFUSED, COMMANDS))
def test_a_folder_is_refused_by_all_in_one_line(kind, name, commands, copied):
    change, words = REFUSED[kind]
    change(copied)
    assert re.search(words, (said := commands(name, copied)).refusal()), said.err
    assert not (copied / "ran").exists()


PREFIXES = ("_orig_mod.", "module.", "base_model.model.", "model.", "student.", "model.module.")


@pytest.mark.parametrize("prefix", PREFIXES)
def test_what_training_tools_put_before_names_is_taken_off(prefix, copied, tokens_BT):
    expected = logits_of(AutoModelForCausalLM.from_pretrained(copied), tokens_BT)
    with rewritten(copied) as tensors:
        for name in list(tensors):
            tensors[prefix + name] = tensors.pop(name)
    dense = loaded(copied)
    for model in (dense.model, load_weights(copied, torch.float32)):
        assert torch.equal(logits_of(model, tokens_BT), expected)


def test_names_inside_layers_lose_their_wrappers(copied, tokens_BT):
    expected = logits_of(AutoModelForCausalLM.from_pretrained(copied), tokens_BT)
    with rewritten(copied) as tensors:
        for name in [name for name in tensors if ".mlp." in name]:
            tensors[name.replace(".mlp.", "._orig_mod.mlp._checkpoint_wrapped_module.")] = (
                tensors.pop(name)
            )
    assert torch.equal(logits_of(loaded(copied).model, tokens_BT), expected)


def test_an_ambiguous_prefix_is_named(copied):
    with rewritten(copied) as tensors:
        for name in list(tensors):
            tensors[f"student.{name}"] = tensors.pop(name)
        tensors["teacher.model.norm.weight"] = torch.ones(64)
    assert "begins with 'student.', but teacher." in refusal(describe_dense, str(copied))
    with rewritten(copied) as tensors:
        for name in list(tensors):
            tensors[name.removeprefix("student.")] = tensors.pop(name)
        del tensors["teacher.model.norm.weight"]
        tensors["module.model.norm.weight"] = torch.ones(64)
    assert "are both model.norm.weight" in refusal(describe_dense, str(copied))


def test_equal_copies_and_an_index_are_followed(copied, tokens_BT):
    expected = logits_of(AutoModelForCausalLM.from_pretrained(copied), tokens_BT)
    in_shards(copied, stale=False)
    with rewritten(copied, "model-2.safetensors") as tensors:
        tensors[UP] = load_file(copied / "model-1.safetensors")[UP]
    assert torch.equal(logits_of(loaded(copied).model, tokens_BT), expected)


def test_a_known_type_with_code_is_read_without_it(copied, commands, tokens_BT, monkeypatch):
    """As Phi-3 has it; on a terminal Transformers would ask whether to run the code."""
    expected = logits_of(AutoModelForCausalLM.from_pretrained(copied), tokens_BT)
    code = {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}
    put_into(copied / "config.json", auto_map=code)
    put_into(copied / "tokenizer_config.json", auto_map={"AutoTokenizer": ["mine.T", "mine.T"]})
    (copied / "mine.py").write_text(f"open({str(copied / 'ran')!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda *asked: pytest.fail(f"asks {asked}"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert torch.equal(logits_of(load_weights(copied, torch.float32), tokens_BT), expected)
    for name in ("inspect", "text", "tasks"):
        said = commands(name, copied)
        assert said.status == 0, said.err
    assert not (copied / "ran").exists()


def test_a_gguf_beside_a_checkpoint_is_not_taken_for_it(copied, commands):
    alone = commands("text", copied).out
    (copied / "other.gguf").write_bytes(b"GGUF")
    assert json.loads(commands("text", copied).out)["loss"] == json.loads(alone)["loss"]


@pytest.mark.parametrize(
    "damage", [{"hidden_act": "gelu"}, {"mlp_bias": True}], ids=["activation", "bias"]
)
def test_a_model_that_cannot_be_converted_is_still_measured(damage, tiny_dense, commands, tmp_path):
    """Its class is stock, so that Transformers loads it, with the same refusals."""
    folder = shutil.copytree(tiny_dense("llama", **damage), tmp_path / "model")
    assert commands("text", folder).status == 0
    tensor("model.layers.0.self_attn.q_proj.bias", 64)(folder)
    assert "q_proj.bias is stored" in commands("text", folder).refusal()


@pytest.mark.parametrize(
    "values", [{"pad_token_id": 300}, {"attn_implementation": "flash_attention_2"}]
)
def test_tasks_run_what_a_conversion_reads(values, commands, copied):
    put_into(copied / "config.json", **values)
    said = commands("tasks", copied)
    assert said.status == 0, said.err
