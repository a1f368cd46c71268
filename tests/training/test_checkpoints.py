"""Checkpoints that are damaged, or find no room. Oracles: a run in which nothing happened."""

import hashlib
import json
import logging
import os
import re

import pytest
import torch
from toy_tasks import Regression, metrics_in, trained, warnings_in

from dotmoe.cli import message_of
from dotmoe.common.errors import UserError
from dotmoe.training import folder, loop
from dotmoe.training.config import TrainingConfig
from dotmoe.training.folder import Checkpoints


def truncate(path):
    os.truncate(path, path.stat().st_size - 100)


def alter(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def names_in(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


TENSORS, MANIFEST = "__0_0.distcp", "manifest.json"
DAMAGES = {
    "truncated": (lambda c: truncate(c / TENSORS), rf"{TENSORS} is damaged: \d+ of \d+ bytes"),
    "altered": (lambda c: alter(c / TENSORS), rf"{TENSORS} has been altered"),
    "file missing": (lambda c: (c / TENSORS).unlink(), rf"{TENSORS} is missing"),
    "index altered": (lambda c: alter(c / ".metadata"), r"\.metadata has been altered"),
    "step altered": (lambda c: alter(c / MANIFEST), rf"{MANIFEST} (has been altered|is not JSON)"),
    "manifest truncated": (lambda c: truncate(c / MANIFEST), rf"{MANIFEST} is not JSON"),
    "manifest missing": (lambda c: (c / MANIFEST).unlink(), rf"{MANIFEST} cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(damage, tmp_path, caplog):
    whole = trained(tmp_path)
    assert names_in(tmp_path) == ["step_00000010", "step_00000012"]
    spoil, pattern = DAMAGES[damage]
    spoil(tmp_path / "checkpoints" / "step_00000012")
    with caplog.at_level(logging.WARNING):
        again = trained(tmp_path)
    (warning,) = warnings_in(caplog)
    assert "\n" not in warning
    assert re.search(pattern, warning)
    assert "step_00000010, the checkpoint before" in warning
    assert torch.equal(again.weight, whole.weight)
    # The damaged one has been written again.
    assert Checkpoints(tmp_path).newest().name == "step_00000012"
    for checkpoint in (tmp_path / "checkpoints").iterdir():
        spoil(checkpoint)
    with pytest.raises(UserError, match=r"every checkpoint in .* is damaged .*delete"):
        trained(tmp_path)


def test_minutes_may_pass_before_the_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "_CHECKPOINT_SECONDS", 0)
    trained(tmp_path, training=TrainingConfig())
    assert names_in(tmp_path) == ["step_00000011", "step_00000012"]


def test_what_a_kill_left_half_written_is_not_read_and_goes(tmp_path):
    trained(tmp_path)
    partial = tmp_path / "checkpoints" / ".step_00000015.partial"
    partial.mkdir()
    (partial / TENSORS).write_bytes(b"half")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest().name == "step_00000012"
    checkpoints.save(13, {"a": torch.ones(2)}, {"step": 13})
    assert names_in(tmp_path) == ["step_00000012", "step_00000013"]


class Growing(Regression):
    """Its second checkpoint is 400 kB larger than its first."""

    def state(self):
        return super().state() | {"ballast": torch.zeros(1 if self.seen < 6 else 100_000)}


def test_a_full_disk_loses_no_checkpoint(tmp_path):
    """A limit on the size of files stands in for it: a write is refused in its middle."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match="was truncated") as error:
            trained(tmp_path, task=Growing())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert message_of(error.value).startswith("the disk is full")
    assert names_in(tmp_path) == ["step_00000005"]
    assert Checkpoints(tmp_path).newest().name == "step_00000005"
    assert [line["step"] for line in metrics_in(tmp_path)] == list(range(1, 11))


def test_tensors_are_summed_while_they_are_written_and_never_read(tmp_path, monkeypatch):
    read, tensors = [], {name: torch.randn(size) for name, size in (("a", 3), ("b", 100_000))}
    monkeypatch.setattr("dotmoe.common.files.sha256_of", lambda path: read.append(path.name) or "")
    Checkpoints(tmp_path).save(1, tensors, {"step": 1})
    assert read == [".metadata"]
    checkpoint = tmp_path / "checkpoints" / "step_00000001"
    content = (checkpoint / TENSORS).read_bytes()
    sums = json.loads((checkpoint / MANIFEST).read_text())["files"][TENSORS]
    assert sums == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_the_disk_never_holds_three(tmp_path, monkeypatch):
    held, save = [], folder.save

    def counted(*arguments, **named):
        save(*arguments, **named)
        held.append(sum(path.is_dir() for path in (tmp_path / "checkpoints").iterdir()))

    monkeypatch.setattr(folder, "save", counted)
    trained(tmp_path, training=TrainingConfig(checkpoint_every=2))
    assert held == [1, 2, 2, 2, 2, 2]
    assert names_in(tmp_path) == ["step_00000010", "step_00000012"]


def test_without_a_number_of_steps_only_time_and_the_end_count(tmp_path):
    trained(tmp_path, training=TrainingConfig())
    assert names_in(tmp_path) == ["step_00000012"]
