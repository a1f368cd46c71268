"""Models of the hub: commits, caches, and repositories that cannot be read."""

import json
import re
import shutil
from importlib.util import find_spec

import pytest
from huggingface_hub import constants

from dotmoe.common.errors import UserError
from dotmoe.models.checkpoint import checkpoint_folder
from dotmoe.models.load import describe_dense
from hub import Hub
from runs import TINY_CONVERT, TINY_FINETUNE, put_into

NAME = "some-one/Tiny"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that this process uses, with an empty cache."""
    made = Hub()
    with made.served() as address:
        files = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        made.offline = lambda: monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        made.online = lambda: monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield made


def test_a_run_keeps_its_commit_when_main_moves(hub, copied, text_file, tmp_path, command):
    first = hub.push(NAME, copied)
    run = tmp_path / "run"
    options = {"data": text_file, **TINY_CONVERT, "repair": [], "repair_epochs": 0}
    del options["no_repair"]
    assert command("convert", NAME, run, **options).status == 0
    put_into(copied / "config.json", transformers_version="99")
    second = hub.push(NAME, copied)
    assert describe_dense(NAME).revision == second != first
    again = command("convert", NAME, run, **options)
    assert again.status == 0, again.err
    assert json.loads((run / "manifest.json").read_text())["revision"] == first
    shutil.rmtree(run / "6_evaluate")  # as if it had been interrupted
    assert command("convert", NAME, run, **options).status == 0
    assert command("export", run, tmp_path / "again").status == 0
    for exported in (run / "5_export", tmp_path / "again"):
        record = json.loads((exported / "dotmoe.json").read_text())
        assert (record["source"], record["revision"]) == (NAME, first)
    hub.offline()
    assert command("finetune", run, tmp_path / "finetuned", **TINY_FINETUNE).status == 0
    record = json.loads((tmp_path / "finetuned/5_export/dotmoe.json").read_text())
    assert (record["source"], record["revision"]) == (NAME, first)


def test_a_model_can_be_named_at_a_commit(hub, copied, text_file, command):
    first = hub.push(NAME, copied)
    tokens = json.loads((copied / "config.json").read_text())["max_position_embeddings"]
    put_into(copied / "config.json", max_position_embeddings=tokens // 2)
    hub.push(NAME, copied)
    dense = describe_dense(f"{NAME}@{first}")
    assert (dense.revision, dense.config.max_position_embeddings) == (first, tokens)
    assert describe_dense(NAME).config.max_position_embeddings == tokens // 2
    for name, seen in ((NAME, tokens // 2), (f"{NAME}@{first}", tokens)):
        told = command("inspect", name, json=[], expert_size=8)
        assert json.loads(told.out)["model"] == name, told.err
        found = command("evaluate", name, text=text_file, window=seen, max_tokens=600)
        assert found.status == 0, found.err
        assert command("evaluate", name, text=text_file, window=seen + 1).status == 2
    hub.offline()
    assert describe_dense(f"{NAME}@{first}").revision == first


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ("pytorch_model.bin", r"only as pytorch_model.bin, and pickles .* some-one/Tiny@refs/pr/N"),
        ("model-Q4_0.gguf", "holds GGUF files. Download one, such as model-Q4_0.gguf"),
        ("model.msgpack", r"holds no model with config.json and \*.safetensors"),
    ],
)
def test_weights_of_another_kind_are_named(hub, copied, weights, says):
    (copied / "model.safetensors").rename(copied / weights)
    (copied / "optimizer.pt").write_bytes(b"")  # of no use
    (copied / "args.bin").write_bytes(b"")
    hub.push(NAME, copied)
    with pytest.raises(UserError, match=says):
        describe_dense(NAME)


def test_without_a_network_the_cache_suffices_if_it_holds_a_model(hub, copied):
    (copied / "params.json").write_text("{}")
    sha = hub.push(NAME, copied)
    checkpoint_folder(NAME, config_only=True)
    hub.offline()
    with pytest.raises(UserError, match="network"):
        describe_dense(NAME)
    hub.online()
    (checkpoint_folder(NAME) / "params.json").unlink()  # other libraries do not fetch it
    hub.offline()
    assert describe_dense(NAME).revision == sha


def test_what_is_published_names_no_folder_of_this_machine(finished, tmp_path, command):
    options = {"format": "gguf_glm4moe"} if find_spec("gguf") else {}
    assert command("export", finished.folder, tmp_path / "out", **options).status == 0
    for folder in (finished.folder / "5_export", tmp_path / "out"):
        record = json.loads((folder / "dotmoe.json").read_text())
        assert (record["source"], record["revision"]) == (finished.source.name, None)
        for path in folder.iterdir():
            assert not re.search(rb"/(tmp|home|var)/|pytest-", path.read_bytes()), path
