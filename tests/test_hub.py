"""Models of the hub: commits, caches, and repositories that cannot be read."""

import json
import os
import re
import shutil
from importlib.util import find_spec

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from dotmoe.common.errors import UserError
from dotmoe.common.files import write_text
from dotmoe.models import source
from dotmoe.models.load import describe_dense
from dotmoe.models.source import checkpoint_folder
from runs import TINY_CONVERT, TINY_FINETUNE, put_into

NAME = "some-one/Tiny"


class Hub:
    """Takes the place of `snapshot_download`, with the cache's own layout of folders."""

    def __init__(self, folder):
        self.cache, self.pushed = folder / "hub", folder / "pushed"
        self.commits, self.is_offline = [], False

    def push(self, folder):
        """Make a folder the new `main` of the one model; returns the commit's name."""
        self.commits.append(f"{len(self.commits):040}")
        shutil.copytree(folder, self.pushed / self.commits[-1])
        return self.commits[-1]

    def download(self, name, *, revision, **patterns):
        if self.is_offline:
            raise LocalEntryNotFoundError("no network")
        model, sha = self.cache / f"models--{name.replace('/', '--')}", revision or self.commits[-1]
        snapshot, files = model / "snapshots" / sha, os.listdir(self.pushed / sha)
        snapshot.mkdir(parents=True, exist_ok=True)
        for file in filter_repo_objects(files, **patterns):
            shutil.copy(self.pushed / sha / file, snapshot)
        if revision is None:
            write_text(model / "refs" / "main", sha)
        return str(snapshot)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that this process uses, with an empty cache."""
    made = Hub(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(made.cache))
    monkeypatch.setattr(source, "snapshot_download", made.download)
    return made


def test_a_run_keeps_its_commit_when_main_moves(hub, copied, text_file, tmp_path, command):
    first = hub.push(copied)
    run = tmp_path / "run"
    options = {"data": text_file, **TINY_CONVERT, "repair": [], "repair_epochs": 0}
    del options["no_repair"]
    assert command("convert", NAME, run, **options).status == 0
    put_into(copied / "config.json", transformers_version="99")
    second = hub.push(copied)
    assert describe_dense(NAME).revision == second != first
    again = command("convert", NAME, run, **options)
    assert again.status == 0, again.err
    assert json.loads((run / "manifest.json").read_text())["revision"] == first
    assert f"dotmoe convert {NAME}@{first} AGAIN" in (run / "7_report/report.md").read_text()
    shutil.rmtree(run / "6_evaluate")  # as if it had been interrupted
    assert command("convert", NAME, run, **options).status == 0
    assert command("export", run, tmp_path / "again").status == 0
    for exported in (run / "5_export", tmp_path / "again"):
        record = json.loads((exported / "dotmoe.json").read_text())
        assert (record["source"], record["revision"]) == (NAME, first)
    hub.is_offline = True
    assert command("finetune", run, tmp_path / "finetuned", **TINY_FINETUNE).status == 0
    record = json.loads((tmp_path / "finetuned/5_export/dotmoe.json").read_text())
    assert (record["source"], record["revision"]) == (NAME, first)


def test_a_model_can_be_named_at_a_commit(hub, copied, text_file, command):
    first = hub.push(copied)
    tokens = json.loads((copied / "config.json").read_text())["max_position_embeddings"]
    put_into(copied / "config.json", max_position_embeddings=tokens // 2)
    hub.push(copied)
    dense = describe_dense(f"{NAME}@{first}")
    assert (dense.revision, dense.config.max_position_embeddings) == (first, tokens)
    assert describe_dense(NAME).config.max_position_embeddings == tokens // 2
    for name, seen in ((NAME, tokens // 2), (f"{NAME}@{first}", tokens)):
        result = command("inspect", name, json=[], expert_size=8)
        assert json.loads(result.out)["model"] == name, result.err
        found = command("evaluate", name, text=text_file, window=seen, max_tokens=600)
        assert found.status == 0, found.err
        assert command("evaluate", name, text=text_file, window=seen + 1).status == 2
    hub.is_offline = True
    assert describe_dense(f"{NAME}@{first}").revision == first


def test_weights_of_another_kind_are_refused(hub, copied, command):
    (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    assert "and pickles are not read." in command("inspect", copied).refusal()
    hub.push(copied)
    with pytest.raises(UserError, match=r"has no \*\.safetensors\. .* \(pickles are not read\)"):
        describe_dense(NAME)


def test_without_a_network_the_cache_suffices_if_it_holds_a_model(hub, copied):
    sha = hub.push(copied)
    checkpoint_folder(NAME, config_only=True)
    hub.is_offline = True
    with pytest.raises(UserError, match="offline, and not in the cache"):
        describe_dense(NAME)
    hub.is_offline = False
    checkpoint_folder(NAME)
    hub.is_offline = True
    assert describe_dense(NAME).revision == sha


def test_what_is_published_names_no_folder_of_this_machine(finished, tmp_path, command):
    options = {"format": "gguf_glm4moe"} if find_spec("gguf") else {}
    assert command("export", finished.folder, tmp_path / "out", **options).status == 0
    for folder in (finished.folder / "5_export", tmp_path / "out"):
        record = json.loads((folder / "dotmoe.json").read_text())
        assert (record["source"], record["revision"]) == (finished.source.name, None)
        for path in folder.iterdir():
            assert not re.search(rb"/(tmp|home|var)/|pytest-", path.read_bytes()), path
