"""Every file of a run folder damaged in turn: a command that would read it says so in one line.

Oracle: the uninterrupted run, byte by byte. All kinds of damage to a file are in `test_files.py`.
"""

import shutil
from pathlib import Path

import pytest

READ_BY_EXPORT = {"manifest.json", "0_data/heldout.safetensors", "3_extract/layout.safetensors"}
HARMLESS = {".lock", "config.json", "5_export/README.md"}
"""Never read: the card is for people, config.json is a copy for `--config`."""
HOLDS_CHECKSUMS = {"manifest.json", "5_export/dotmoe.json"}
"""Has checksums of other files, and none of its own that would tell a changed byte."""


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def delete(path):
    path.unlink()


each_damage = pytest.mark.parametrize(
    "damage", [flip, pytest.param(delete, marks=pytest.mark.slow)]
)


@each_damage
def test_a_run_that_goes_on_reads_no_damaged_file(damage, finished, command, tmp_path):
    unfinished = finished.copied_to(tmp_path / "unfinished")
    shutil.rmtree(unfinished.folder / "5_export")
    names = [name for name in unfinished.files() if name[0] in "0123" or name == "manifest.json"]
    unchecked = ("config.json", "manifest.json")  # where the folder's own name may change
    for name in names:
        if damage is flip and name in HOLDS_CHECKSUMS:
            continue
        copy = unfinished.copied_to(tmp_path / "run")
        damage(copy.folder / name)
        before = copy.contents(*unchecked)
        is_gone = damage is delete and name == "manifest.json"
        of_stage = [other for other in names if other.split("/")[0] == name.split("/")[0]]
        if damage is delete and of_stage == [name] and not is_gone:
            assert "is gone: it is made again" in command(*copy.command()).err
            continue
        assert ("is in the way" if is_gone else name) in command(*copy.command()).refusal()
        assert copy.contents(*unchecked) == before, name


@each_damage
def test_a_finished_run_gives_out_no_damaged_result(damage, finished, command, tmp_path):
    evaluate = ["evaluate", tmp_path / "run", "--text", finished.options["data"]]
    for name in set(finished.files()) - HARMLESS:
        if damage is flip and name in HOLDS_CHECKSUMS:
            continue
        copy = finished.copied_to(tmp_path / "run")
        damage(copy.folder / name)
        if name.startswith("5_export/"):
            line = command(*evaluate, max_tokens=64).refusal()
            assert name.removeprefix("5_export/") in line or "tokenizer" in line, f"{name}: {line}"
        elif name[0] == "6" and damage is not delete:
            assert name in command(*copy.command()).refusal()
        elif name in READ_BY_EXPORT:
            line = command("export", copy.folder, tmp_path / "again").refusal()
            assert name in line or "no run with a finished" in line
            assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("name", ["0_data/heldout.safetensors", "3_extract/layout.safetensors"])
def test_the_remedy_in_the_message_repairs_a_finished_run(name, finished, command, tmp_path):
    copy = finished.copied_to(tmp_path / "run")
    stage = copy.folder / Path(name).parent
    flip(copy.folder / name)
    reader = "analyse" if name[0] == "0" else "export"
    line = (reader, copy.folder, *(() if name[0] == "0" else (tmp_path / "again",)))
    remedy = f"Delete {stage} and {copy.folder / '5_export'} and repeat the"
    assert remedy in command(*line).refusal()
    shutil.rmtree(stage)
    if name[0] != "0":
        assert f"{stage} is gone. {remedy}" in command(*line).refusal()
    shutil.rmtree(copy.folder / "5_export")
    assert command(*copy.command()).status == 0
    assert copy.tensors() == finished.tensors()
    assert command(*line).status == 0


@pytest.mark.parametrize("name", ["1_calibrate/state.safetensors", "6_evaluate/results.json"])
def test_the_remedy_in_the_message_repairs_the_run(name, finished, command, tmp_path):
    copy = finished.copied_to(tmp_path / "run")
    if name[0] == "1":
        shutil.rmtree(copy.folder / "5_export")
    flip(copy.folder / name)
    path = copy.folder / (name if name[0] == "6" else "1_calibrate")
    assert f"Delete {path} and repeat the dotmoe convert" in command(*copy.command()).refusal()
    path.unlink() if path.is_file() else shutil.rmtree(path)
    assert command(*copy.command()).status == 0
    assert copy.tensors() == finished.tensors()
