"""Bad input at the command line: one line that says what to do, and nothing left behind."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from runs import TINY_CONVERT


@pytest.fixture
def text(tmp_path, text_file):
    path = tmp_path / "text.txt"
    path.write_text(text_file.read_text())
    return path


@pytest.fixture
def refused(command, text, tmp_path):
    """The line with which a conversion is refused."""

    def convert(model, out="run", **options):
        options = {"data": text, **TINY_CONVERT, "steps": 2, **options}
        return command("convert", model, tmp_path / out, **options).refusal()

    return convert


def files(folder):
    return set(folder.rglob("*"))


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        (b"", "text.txt is empty"),
        (bytes(range(256)) * 20, "text.txt is not UTF-8"),
        (b"short", "text.txt has .*seq_len"),
    ],
)
def test_a_bad_text_is_named(content, pattern, tiny_dense, text, tmp_path, refused):
    text.write_bytes(content)
    line = refused(tiny_dense("llama"))
    assert re.search(pattern, line), line
    assert files(tmp_path) == {text}


def test_a_short_evaluation_text_is_named_before_anything_is_trained(tiny_dense, tmp_path, refused):
    short = tmp_path / "short.txt"
    short.write_text("too little")
    assert "short.txt has 11 tokens" in refused(tiny_dense("llama"), eval_text=short)
    assert not (tmp_path / "run").exists()


def break_config(**changes):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def spoil_weight(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def drop_weight(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def drop_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


BROKEN_MODELS = {
    "gpt2": (break_config(model_type="gpt2"), "gpt2.*llama, mistral"),
    "relu": (break_config(hidden_act="relu"), "relu.*SwiGLU"),
    "mlp_bias": (break_config(mlp_bias=True), "mlp_bias.*without"),
    "nan": (spoil_weight, r"layers\.1\.mlp\.up_proj.*NaN"),
    "lost": (drop_weight, r"layers\.1\.mlp\.up_proj.*random"),
    "truncated": (truncate, "no whole safetensors"),
    "tokenizer": (drop_tokenizer, r"no tokenizer\.json"),
}


@pytest.mark.parametrize("name", BROKEN_MODELS)
def test_a_broken_model_is_named_and_leaves_nothing(name, tiny_dense, tmp_path, refused):
    change, pattern = BROKEN_MODELS[name]
    model = shutil.copytree(tiny_dense("llama"), tmp_path / "model")
    change(model)
    line = refused(model)
    assert re.search(pattern, line), line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["lost", "truncated", "tokenizer"])
def test_evaluate_refuses_a_broken_model(name, tiny_dense, text, tmp_path, command):
    change, pattern = BROKEN_MODELS[name]
    model = shutil.copytree(tiny_dense("llama"), tmp_path / "model")
    change(model)
    assert re.search(pattern, command("evaluate", model, text=text).refusal())


def test_evaluate_refuses_a_folder_without_a_model(text, tmp_path, command):
    assert "config.json" in command("evaluate", tmp_path, text=text).refusal()


def test_a_float16_checkpoint_is_told_the_option_that_helps(tiny_dense, refused):
    assert "--export-dtype" in refused(tiny_dense("llama", dtype="float16"))


@pytest.mark.parametrize("out", ["text.txt", "text.txt/run", "full"])
def test_an_output_in_the_way_is_left_as_it_was(out, tiny_dense, tmp_path, refused):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    before = files(tmp_path)
    line = refused(tiny_dense("llama"), out)
    assert re.search("in the way|cannot be made", line), line
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        ("{", "not JSON"),
        ("[]", "JSON object"),
        ('{"eval_token": 3}', "eval_token .*Did you mean eval_tokens"),
        ('{"align": 3}', "align .*JSON object"),
        ('{"align": {"lr": "big"}}', "lr .*'big'.*float"),
        ("{}", "lacks model"),
    ],
)
def test_a_bad_config_file_is_refused(content, pattern, tmp_path, command):
    path = tmp_path / "config.json"
    path.write_text(content)
    line = command("convert", "--config", path).refusal()
    assert re.search(pattern, line), line
