"""What a model is known by: all of its content, and nothing else. Oracle: the list of files."""

import json
import os
import shutil
import time

import pytest
from safetensors.torch import load_file, save_file

from dotmoe.common.cache import cached_in
from dotmoe.common.errors import UserError
from dotmoe.common.files import sha256_of
from dotmoe.models import identity
from dotmoe.models.identity import cached_sha256, fingerprint
from runs import TINY_CONVERT, TINY_FINETUNE, TinyRun, put_into, rewritten, words

WIDE = {"hidden_size": 64, "intermediate_size": 2048, "num_hidden_layers": 3}
"""A model whose file has more than a MiB before and after the FFN of layer 1."""
FFN = "model.layers.1.mlp.up_proj.weight"
COUNT = (
    *("config.json", "generation_config.json", "model.safetensors", "adapter_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt", "vocab.json"),
    *("added_tokens.json", "special_tokens_map.json", "tokenizer.model", "tekken.json"),
    *(
        "additional_chat_templates/tools.jinja",
        "modeling_dotmoe.py",
        "model.safetensors.index.json",
    ),
)
DO_NOT_COUNT = ("README.md", "dotmoe.json", "LICENSE.txt", "optimizer.pt", "run.py")


@pytest.fixture
def wide(tiny_dense, tmp_path):
    """A copy of a model that is too large to be read whole at a glance."""
    return shutil.copytree(tiny_dense("llama", **WIDE), tmp_path / "wide")


def test_every_tensor_counts(wide):
    folder, seen = wide, {fingerprint(wide)}
    names = sorted(load_file(folder / "model.safetensors"))
    for name in names:
        with rewritten(folder) as tensors:
            tensors[name].view(-1)[tensors[name].numel() // 2] += 1
        seen.add(fingerprint(folder))
    assert len(seen) == len(names) + 1


@pytest.mark.parametrize("name", COUNT)
def test_every_file_that_is_read_counts(name, copied):
    before = fingerprint(copied)
    (copied / name).parent.mkdir(exist_ok=True)
    with (copied / name).open("a") as file:
        file.write(" ")
    assert fingerprint(copied) != before


def test_weights_below_the_folder_count(copied):
    weights = copied / "weights/model-1.safetensors"
    weights.parent.mkdir()
    (copied / "model.safetensors").rename(weights)
    index = {"weight_map": dict.fromkeys(load_file(weights), "weights/model-1.safetensors")}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    before = fingerprint(copied)
    tensors = load_file(weights)
    tensors[FFN].zero_()
    save_file(tensors, weights)
    assert fingerprint(copied) != before


@pytest.mark.parametrize("name", DO_NOT_COUNT)
def test_what_is_beside_a_model_and_where_it_lies_does_not_count(name, copied, tmp_path):
    before = fingerprint(copied)
    (copied / name).write_text("{}")
    os.utime(copied / "config.json", (0, 0))
    assert fingerprint(copied.rename(tmp_path / "elsewhere")) == before


def test_a_large_file_is_read_once_until_it_changes(tmp_path, monkeypatch):
    read = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(identity, "sha256_of", lambda file: (read.append(file), sha256_of(file))[1])
    monkeypatch.setattr(identity, "_SLOW_BYTES", 4)
    now, file = time.time_ns(), tmp_path / "weights"
    file.write_bytes(b"one")
    for content in (b"first", b"other"):
        file.write_bytes(content)
        os.utime(file, ns=(now, now))  # as a copy that keeps times leaves them
        for _ in range(2):
            assert cached_sha256(file) == sha256_of(file)
        assert read == [file] * 2, "what changed just now may change again within its time"
        monkeypatch.setattr(identity, "_SETTLED_NS", -1)
        for _ in range(2):
            assert cached_sha256(file) == sha256_of(file)
        assert read == [file] * 3
        monkeypatch.setattr(identity, "_SETTLED_NS", 10**12)
        read.clear()
    (tmp_path / "cache/dotmoe/fingerprints").chmod(0o500)
    assert cached_sha256(file) == sha256_of(file)


def test_a_model_that_changed_after_a_conversion_is_refused(wide, text_file, command, tmp_path):
    made = TinyRun("convert", wide, tmp_path / "run", {"data": text_file, **TINY_CONVERT}).made()
    shutil.rmtree(made.folder / "5_export")
    before, kept = made.contents(".lock"), shutil.copytree(wide, tmp_path / "kept")

    def another_ffn():
        with rewritten(wide) as tensors:
            tensors[FFN].zero_()

    for change in (
        another_ffn,
        lambda: put_into(wide / "tokenizer_config.json", model_max_length=77),
        lambda: (wide / "chat_template.jinja").write_text("{{ messages }}"),
    ):
        change()
        for line in (
            made.command(),
            words("export", made.folder, tmp_path / "again"),
            words("finetune", made.folder, tmp_path / "tuned", **TINY_FINETUNE),
        ):
            assert "files have changed since" in command(*line).refusal()
        assert made.contents(".lock") == before
        shutil.rmtree(wide)
        shutil.copytree(kept, wide)
    assert command(*made.command()).status == 0


def test_a_dense_model_that_changed_is_no_baseline_of_its_conversion(
    copied, text_file, command, tmp_path
):
    made = TinyRun("convert", copied, tmp_path / "run", {"data": text_file, **TINY_CONVERT}).made()
    text = {"text": text_file, "max_tokens": 128}
    measured = [made.folder, made.folder / "5_export"]
    for model in measured:
        assert command("evaluate", model, against=copied, **text).status == 0
    with rewritten(copied) as tensors:
        tensors[FFN].zero_()
    for model in measured:
        for line in ({"fidelity": []}, {"against": copied}, {"against": copied, "fidelity": []}):
            said = command("evaluate", model, **line, **text).refusal()
            assert "files have changed since" in said
    assert command("evaluate", copied, **text).status == 0


def test_a_cache_that_cannot_be_written_or_has_no_home_names_its_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
        with pytest.raises(UserError, match=r"cannot be written, but .* variable XDG_CACHE_HOME"):
            cached_in("answers")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user without a name
    with pytest.raises(UserError, match=r"no home folder.* variable XDG_CACHE_HOME"):
        cached_in("answers")


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_cache_that_cannot_be_made_names_its_variable(name, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
    with pytest.raises(UserError, match="environment variable XDG_CACHE_HOME"):
        cached_in("answers")
