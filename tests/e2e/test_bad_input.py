"""Bad texts, models and folders at the command line: one line that says what, nothing left behind.

Options out of range are in `contract/test_contract_errors.py`, config files in `test_options.py`,
all that can be wrong with a model in `test_load.py`.
"""

import re
import shutil

import pytest
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
def test_a_bad_text_is_named(option, tiny_dense, tmp_path, refused):
    bad = tmp_path / "bad.txt"
    for content, words in ((bytes(range(256)), "bad.txt is not UTF-8"), (b"short", "bad.txt has")):
        bad.write_bytes(content)
        assert words in refused(tiny_dense("llama"), **{option: bad})


def test_a_broken_model_is_named(tiny_dense, text, tmp_path, refused, command):
    model = shutil.copytree(tiny_dense("llama"), tmp_path / "model")
    weights = model / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})

    def require(pattern):
        assert re.search(pattern, refused(model))
        assert re.search(pattern, command("evaluate", model, text=text).refusal())

    require(r"layers\.1\.mlp\.up_proj.*random")
    weights.write_bytes(weights.read_bytes()[:5000])
    require("no whole safetensors")
    shutil.copy(tiny_dense("llama") / "model.safetensors", weights)
    (model / "tokenizer.json").unlink()
    require(r"no tokenizer\.json")


@pytest.mark.parametrize("out", ["text.txt", "text.txt/run", "full"])
def test_an_output_in_the_way_is_left_as_it_was(out, tiny_dense, tmp_path, refused):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    assert re.search("in the way|cannot be made", refused(tiny_dense("llama"), out))


def test_a_bad_config_file_is_named(tmp_path, command):
    path = tmp_path / "config.json"
    path.write_text('{"align": 3}')
    assert f"align of {path} is 3" in command("convert", "--config", path).refusal()
