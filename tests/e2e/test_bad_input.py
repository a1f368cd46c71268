"""Bad texts, models and folders at the command line: one line that says what, nothing left behind.

Options out of range are in `contract/test_contract_errors.py`, config files in `test_options.py`.
"""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from runs import TINY_CONVERT


@pytest.fixture
def text(tmp_path, text_file):
    return shutil.copy(text_file, tmp_path / "text.txt")


@pytest.fixture
def refused(command, text, tmp_path):
    """The line with which a conversion is refused; what is there stays as it was."""

    def convert(model, out="run", **options):
        before = set(tmp_path.rglob("*"))
        options = {"data": text, **TINY_CONVERT, "steps": 2, **options}
        line = command("convert", model, tmp_path / out, **options).refusal()
        assert set(tmp_path.rglob("*")) == before
        return line

    return convert


@pytest.mark.parametrize("option", ["data", "eval_text"])
@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        (b"", "bad.txt is empty"),
        (bytes(range(256)) * 20, "bad.txt is not UTF-8"),
        (b"short", "bad.txt has"),
    ],
)
def test_a_bad_text_is_named(content, pattern, option, tiny_dense, tmp_path, refused):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(content)
    assert re.search(pattern, refused(tiny_dense("llama"), **{option: bad}))


def changed_config(**changes):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def with_weight(value):
    """Puts a number into a weight; None: removes the weight."""

    def change(folder):
        weights, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
        if value is None:
            del weights[name]
        else:
            weights[name][0, 0] = value
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return change


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


BROKEN_MODELS = {
    "gpt2": (changed_config(model_type="gpt2"), "gpt2.*llama, mistral"),
    "relu": (changed_config(hidden_act="relu"), "relu.*SwiGLU"),
    "mlp_bias": (changed_config(mlp_bias=True), "mlp_bias.*without"),
    "nan": (with_weight(torch.nan), r"layers\.1\.mlp\.up_proj.*NaN"),
    "lost": (with_weight(None), r"layers\.1\.mlp\.up_proj.*random"),
    "truncated": (truncate, "no whole safetensors"),
    "tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), r"no tokenizer\.json"),
}


@pytest.mark.parametrize("name", BROKEN_MODELS)
def test_a_broken_model_is_named(name, tiny_dense, text, tmp_path, refused, command):
    change, pattern = BROKEN_MODELS[name]
    model = shutil.copytree(tiny_dense("llama"), tmp_path / "model")
    change(model)
    assert re.search(pattern, refused(model))
    if name in ("lost", "truncated", "tokenizer"):
        assert re.search(pattern, command("evaluate", model, text=text).refusal())


def test_a_folder_without_a_model_is_named(tmp_path, refused):
    assert "config.json" in refused(tmp_path)


def test_a_float16_checkpoint_is_told_the_option_that_helps(tiny_dense, refused):
    assert "--export-dtype" in refused(tiny_dense("llama", dtype="float16"))


@pytest.mark.parametrize("out", ["text.txt", "text.txt/run", "full"])
def test_an_output_in_the_way_is_left_as_it_was(out, tiny_dense, tmp_path, refused):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    assert re.search("in the way|cannot be made", refused(tiny_dense("llama"), out))


def test_a_bad_config_file_is_named(tmp_path, command):
    path = tmp_path / "config.json"
    for content, words in (("{", "not JSON"), ('{"align": 3}', "align"), ("{}", "lacks model")):
        path.write_text(content)
        line = command("convert", "--config", path).refusal()
        assert f"{path}" in line
        assert words in line
