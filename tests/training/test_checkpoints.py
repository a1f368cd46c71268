"""Checkpoints that are damaged, or find no room. Oracles: a run in which nothing happened."""

import multiprocessing
import os
import pickle
import shutil
import signal

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from toy_tasks import trained

from dotmoe.common.errors import UserError
from dotmoe.training import folder, loop
from dotmoe.training.config import TrainingConfig
from dotmoe.training.folder import Checkpoints


def truncate(path):
    os.truncate(path, path.stat().st_size - 100)


def names_in(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("spoil", [truncate, os.unlink])
def test_a_damaged_checkpoint_is_refused_and_without_it_the_one_before_is_read(
    spoil, name, tmp_path, caplog
):
    whole = trained(tmp_path)
    assert names_in(tmp_path) == ["step_00000010", "step_00000012"]
    spoil(tmp_path / "checkpoints" / "step_00000012" / name)
    with pytest.raises(UserError, match=r"step_00000012 is damaged .*\. Delete it,") as error:
        trained(tmp_path)
    assert "\n" not in str(error.value)
    assert "root" not in {record.name for record in caplog.records}  # torch prints tracebacks there
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000012")
    assert torch.equal(trained(tmp_path).weight, whole.weight)
    assert Checkpoints(tmp_path).newest().name == "step_00000012"


class Planted:
    """Unpickled, it makes a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


def planted_metadata(step, mark):
    (step / ".metadata").write_bytes(pickle.dumps(Planted(mark)))


def planted_values(step, mark):
    """The metadata say that tensors are pickles, which torch would unpickle."""
    with (step / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    names = metadata.state_dict_metadata
    metadata.state_dict_metadata = {name: BytesStorageMetadata() for name in names}
    (step / "planted").write_bytes(pickle.dumps(Planted(mark)))
    for index, stored in list(metadata.storage_data.items()):
        stored.relative_path, stored.offset = "planted", 0
        stored.length = (step / "planted").stat().st_size
        metadata.storage_data[type(index)(index.fqn)] = stored
    (step / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("plant", [planted_metadata, planted_values])
def test_a_checkpoint_from_elsewhere_runs_no_code(plant, tmp_path):
    trained(tmp_path)
    mark = tmp_path / "mark"
    plant(tmp_path / "checkpoints" / "step_00000012", mark)
    with pytest.raises(UserError, match=r"step_00000012 is damaged .* which no checkpoint has"):
        trained(tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize("seconds", [0, 1800])
def test_without_a_number_of_steps_only_time_and_the_end_count(seconds, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "_CHECKPOINT_SECONDS", seconds)
    trained(tmp_path, training=TrainingConfig())
    assert names_in(tmp_path) == ["step_00000011", "step_00000012"][seconds > 0 :]


def test_a_kill_while_one_is_written_leaves_the_one_before(tmp_path, monkeypatch):
    save, cut = folder.save, tmp_path / "cut"

    def killed(*arguments, **named):
        save(*arguments, **named)
        if (cut / "checkpoints" / "step_00000005").exists():  # this is the second
            os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patched:
        patched.setattr(folder, "save", killed)
        process = multiprocessing.get_context("fork").Process(target=trained, args=(cut,))
        process.start()
        process.join()
    assert process.exitcode == -signal.SIGKILL
    assert any(cut.glob("checkpoints/.step_00000010.partial/*"))
    assert torch.equal(trained(cut).weight, trained(tmp_path / "whole").weight)
    assert names_in(cut) == ["step_00000010", "step_00000012"], "what was half written is gone"


def test_without_room_for_a_copy_the_steps_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "memory_of", lambda device: 100)
    monkeypatch.delattr(folder, "DefaultStager")
    trained(tmp_path)
    assert names_in(tmp_path) == ["step_00000010", "step_00000012"]


def test_the_disk_never_holds_three(tmp_path, monkeypatch):
    held, save = [], folder.save

    def counted(*arguments, **named):
        save(*arguments, **named)
        held.append(sum(path.is_dir() for path in (tmp_path / "checkpoints").iterdir()))

    monkeypatch.setattr(folder, "save", counted)
    trained(tmp_path, training=TrainingConfig(checkpoint_every=2))
    assert held == [1, 2, 2, 2, 2, 2]
    assert names_in(tmp_path) == ["step_00000010", "step_00000012"]
