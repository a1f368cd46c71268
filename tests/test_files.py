"""Whole files, checksums, whole folders. Oracle: hashlib."""

import errno
import hashlib
import math
import os
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import save_file

from dotmoe.common import files
from dotmoe.common.errors import UserError
from dotmoe.common.files import (
    alone_in,
    checksums,
    complete_folder,
    damage_in,
    in_turn,
    locked,
    new_folder,
    read_json,
    remove,
    save_tensors,
    sha256_of,
    write_json,
    write_text,
)
from dotmoe.export.format import TensorSpec
from dotmoe.export.gguf_file import write_gguf
from dotmoe.export.transformers_format import write_checkpoint
from dotmoe.method.state import AlignState, save_states


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e5])  # the last is infinite in 16 bits
@pytest.mark.parametrize(
    "save",
    [
        lambda bad, path: save_states((AlignState(affinity_LNE=bad, router_LED=bad),), path),
        lambda bad, path: save_tensors({"whole": torch.arange(3), "affinity": bad}, path / "s"),
        lambda bad, path: write_checkpoint([TensorSpec.of("affinity", bad, bad.dtype)], path, 99),
        lambda bad, path: write_gguf(
            path / "s", "x", {}, [TensorSpec.of("affinity", bad, bad.dtype)]
        ),
    ],
    ids=["state", "tensors", "export", "gguf"],
)
def test_what_is_not_finite_is_not_saved(save, value, tmp_path):
    bad_LNE = torch.zeros(2, 3, 4)
    bad_LNE[1, 2, 0] = value
    with pytest.raises(UserError, match=r"^affinity would contain NaN or infinity as torch.float"):
        save(bad_LNE.half(), tmp_path)


def test_each_kind_of_damage_is_named(tmp_path):
    path = tmp_path / "inner" / "b"
    path.parent.mkdir()
    (tmp_path / "a").write_bytes(b"")
    path.write_bytes(b"b" * 100)
    recorded = checksums(tmp_path, ["inner/b", "a"])
    assert list(recorded) == ["a", "inner/b"]
    digest = hashlib.sha256(b"b" * 100).hexdigest()
    assert recorded["inner/b"] == {"bytes": 100, "sha256": digest}
    assert sha256_of(path) == digest
    assert damage_in(tmp_path, recorded) is None
    path.write_bytes(b"b" * 99 + b"c")
    assert damage_in(tmp_path, recorded).startswith(f"{path} has been altered: its SHA-256")
    assert damage_in(tmp_path, recorded, unread=["inner/b"]) is None
    path.write_bytes(b"b" * 60)
    message = f"{path} is damaged: 60 of 100 bytes"
    assert damage_in(tmp_path, recorded, unread=["inner/b"]) == message
    path.unlink()
    assert damage_in(tmp_path, recorded) == f"{path} is missing"


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_text(path, "before")

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_text(path, "after")
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["file"]


def test_several_processes_may_write_one_file(tmp_path):
    path = tmp_path / "values.json"
    writers = [
        get_context("fork").Process(target=write_often, args=(path, number)) for number in range(2)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert read_json(path)["by"] in (0, 1)
    assert os.listdir(tmp_path) == ["values.json"]


def write_often(path, number):
    """What one of several processes does."""
    for _ in range(100):
        write_json(path, {"by": number})


@pytest.mark.parametrize("lock", [lambda file: locked(file, "in use"), in_turn])
def test_a_file_system_without_locks_is_used_without(lock, tmp_path, monkeypatch, caplog):
    error = OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr("filelock.FileLock.acquire", MagicMock(side_effect=error))
    with lock(tmp_path / ".lock") as is_held:
        (tmp_path / "made").touch()
    assert not is_held
    assert "cannot be locked" in caplog.text


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_files_have_the_permissions_that_the_umask_leaves(umask, tmp_path):
    before = os.umask(umask)
    try:
        write_json(tmp_path / "values.json", {})
        save_tensors({"whole": torch.arange(3)}, tmp_path / "tensors")
        with complete_folder(tmp_path / "out") as partial:
            save_file({"whole": torch.arange(3)}, partial / "by_another_library")
            (partial / "inner").mkdir()
            (partial / "inner" / "file").touch(0o600)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert (modes.pop("out"), modes.pop("inner")) == (0o777 & ~umask,) * 2
    assert len(modes) == 4
    assert set(modes.values()) == {0o666 & ~umask}


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", None])
def test_a_bad_json_file_gets_one_line(content, tmp_path):
    path = tmp_path / "new" / "values.json"
    write_json(path, {"a": 1})
    assert read_json(path) == {"a": 1}
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(UserError, match=r"values\.json") as error:
        read_json(path)
    assert "\n" not in str(error.value)


def test_a_folder_appears_whole_or_not_at_all_and_is_made_by_one(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(IsADirectoryError), complete_folder(out) as partial:
        partial.write_text("half")
    assert not any(tmp_path.iterdir())
    (tmp_path / ".out.partial").mkdir()  # of a process that was killed
    out.mkdir()
    with complete_folder(out) as partial:
        (partial / "file").write_text("whole")
        with pytest.raises(UserError, match="written by another process"), complete_folder(out):
            pass
    assert os.listdir(tmp_path) == ["out"]
    with pytest.raises(UserError, match="exists already"), complete_folder(out):
        pass
    assert (out / "file").read_text() == "whole"


@pytest.mark.parametrize("make", [lambda out: write_text(out / "of", "another"), Path.touch])
def test_finished_work_is_kept_if_its_place_is_taken_meanwhile(make, tmp_path):
    out = tmp_path / "out"
    (tmp_path / "out-2").touch()

    def write():
        with complete_folder(out) as partial:
            (partial / "file").write_text("whole")
            make(out)

    with pytest.raises(UserError, match=rf"is finished, and kept as {out}-3\."):
        write()
    assert sorted(os.listdir(tmp_path)) == ["out", "out-2", "out-3"]
    assert (tmp_path / "out-3" / "file").read_text() == "whole"
    assert out.is_file() or (out / "of").read_text() == "another"


def test_what_ends_the_work_in_a_folder_is_told_and_the_folder_of_a_user_stays(tmp_path):
    """A link cannot be removed as a folder, nor can a place where a disk is mounted."""
    own, link = tmp_path / "own", tmp_path / "link"
    own.mkdir()
    link.symlink_to(own)
    for folder in (own, link, tmp_path / "new"):
        with pytest.raises(UserError, match="the cause"), alone_in(folder):
            raise UserError("the cause")
    assert sorted(os.listdir(tmp_path)) == ["link", "own"]


def test_names_that_cannot_be_forced_to_disk_do_not_undo_what_is_written(tmp_path, monkeypatch):
    """Some file systems refuse it, and so does a folder that may not be listed."""
    opened = os.open

    def of_files_alone(path, *options, **more):
        if os.path.isdir(path) and not options[0] & os.O_RDWR:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *options, **more)

    monkeypatch.setattr(os, "open", of_files_alone)
    write_json(tmp_path / "values.json", {"a": 1})
    with complete_folder(tmp_path / "out") as partial:
        (partial / "file").write_text("whole")
    assert sorted(os.listdir(tmp_path)) == ["out", "values.json"]


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(UserError, match="cannot be made"), alone_in(place):
            pass
    with pytest.raises(UserError, match="cannot be made"):
        new_folder(tmp_path / "file/below/out")


def test_a_link_to_a_folder_is_written_through_and_removed_without_what_it_links_to(tmp_path):
    link, folder = tmp_path / "link", tmp_path / "folder"
    folder.mkdir()
    link.symlink_to(folder)
    with complete_folder(link) as partial:
        (partial / "file").write_text("whole")
    assert (link.readlink(), os.listdir(folder)) == (folder, ["file"])
    remove(link)
    assert os.listdir(tmp_path) == ["folder"]
    remove(folder)
    assert not os.listdir(tmp_path)
