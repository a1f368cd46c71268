"""Every file of a run folder damaged in turn: a command that would read it says so in one line.

Oracle: the uninterrupted run, byte by byte.
"""

import json
import shutil

import pytest

from dotmoe.cli import run

HARMLESS = {".lock", "config.json", "5_export/README.md"}
"""Never read: the card is for people, config.json is a copy for `--config`."""


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def delete(path):
    path.unlink()


DAMAGES = [
    pytest.param(flip),
    pytest.param(truncate, marks=pytest.mark.slow),
    pytest.param(delete, marks=pytest.mark.slow),
]


def damaged(made, name, damage, folder):
    copy = made.copied_to(folder)
    damage(copy.folder / name)
    return copy


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_that_goes_on_reads_no_damaged_file(damage, finished, command, tmp_path):
    unfinished = finished.copied_to(tmp_path / "unfinished")
    shutil.rmtree(unfinished.folder / "5_export")
    names = [name for name in unfinished.files() if name[0] in "0123" or name == "manifest.json"]
    for name in names:
        copy = damaged(unfinished, name, damage, tmp_path / "run")
        unchecked = ("config.json", "manifest.json")  # where the folder's own name may change
        before = copy.contents(*unchecked)
        said = command(*copy.command())
        if damage is delete and name == "manifest.json":
            assert "is in the way" in said.refusal()
        else:
            assert name in said.refusal(), name
        assert copy.contents(*unchecked) == before, name


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_finished_run_gives_out_no_damaged_result(damage, finished, command, tmp_path):
    for name in finished.files():
        if name[0] not in "56" or name in HARMLESS:
            continue
        copy = damaged(finished, name, damage, tmp_path / "run")
        if name.startswith("5_export/"):
            options = {"text": finished.options["data"], "max_tokens": 64}
            line = command("evaluate", copy.folder, **options).refusal()
            assert name.removeprefix("5_export/") in line or "tokenizer" in line, f"{name}: {line}"
        elif damage is not delete:
            assert name in command(*copy.command()).refusal()


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_an_export_reads_of_a_run_is_checked(damage, finished, command, tmp_path):
    for name in ("manifest.json", "0_data/heldout.safetensors", "3_extract/layout.safetensors"):
        copy = damaged(finished, name, damage, tmp_path / "run")
        line = command("export", copy.folder, tmp_path / "again").refusal()
        assert name in line or "no run with a finished" in line
        assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("name", ["1_calibrate/state.safetensors", "6_evaluate/results.json"])
def test_the_remedy_in_the_message_repairs_the_run(name, finished, command, tmp_path):
    copy = finished.copied_to(tmp_path / "run")
    if name[0] == "1":
        shutil.rmtree(copy.folder / "5_export")
    flip(copy.folder / name)
    line = command(*copy.command()).refusal()
    path = copy.folder / (name if name[0] == "6" else "1_calibrate")
    assert f"Delete {path} and repeat the dotmoe convert" in line
    path.unlink() if path.is_file() else shutil.rmtree(path)
    assert run(copy.command()) == 0
    assert copy.tensors() == finished.tensors()


def test_a_k_changed_by_hand_is_told_and_settled_by_edit(finished, command, tmp_path):
    copy = finished.copied_to(tmp_path / "run")
    path = copy.folder / "5_export" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"num_experts_per_tok": 5}, indent=2))
    evaluate = ["evaluate", copy.folder, "--text", finished.options["data"], "--max-tokens", 64]
    assert "dotmoe edit" in command(*evaluate).refusal()
    assert command("edit", copy.folder, active_experts=5).status == 0
    assert command(*evaluate).status == 0
