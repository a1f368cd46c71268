"""Every file of a run folder damaged in turn: told in one line, or without any effect.

Oracle: the uninterrupted run, byte by byte.
"""

import json
import re

import pytest

from dotmoe.cli import run

HARMLESS = {".lock", "5_export/README.md", "7_report/report.md", "7_report/report.html"}
"""Never read: the card is for people, the report is made anew from the results each time."""
LAST_MARK = "finished/evaluate"
"""Without the last marker its stage is run again: that is how a run asks for it."""


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def empty(path):
    path.write_bytes(b"")


def delete(path):
    path.unlink()


DAMAGES = [
    pytest.param(flip),
    pytest.param(truncate, marks=pytest.mark.slow),
    pytest.param(empty, marks=pytest.mark.slow),
    pytest.param(delete, marks=pytest.mark.slow),
]


def refusal(arguments, capfd):
    """The one line that a command was refused with; None where it ran."""
    capfd.readouterr()
    status = run(arguments)
    error = capfd.readouterr().err
    assert "Traceback" not in error
    if status == 0:
        return None
    assert status == 2, error
    lines = [line for line in error.splitlines() if line.startswith("dotmoe: error: ")]
    assert len(lines) == 1, error
    return lines[0]


def damaged(made, name, damage, folder):
    copy = made.copied_to(folder)
    damage(copy.folder / name)
    return copy


def names_the_file(line, name):
    return name in line or (name == "config.json" and "is in the way" in line)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_finished_run_with_a_damaged_file_is_refused(damage, finished, tmp_path, capfd):
    whole = finished.contents()
    for name in finished.files():
        if damage is not delete and not whole[name]:
            continue
        copy = damaged(finished, name, damage, tmp_path / "run")
        # Of the config's fields that may change, the folder's own name is another in a copy.
        unchecked = [file for file in (".lock", "config.json") if file != name]
        before = copy.contents(*unchecked)
        line = refusal(copy.command(), capfd)
        if line is not None:
            assert names_the_file(line, name), f"{name}: {line}"
            assert name not in HARMLESS
            assert copy.contents(*unchecked) == before, name
            continue
        unread = name.startswith("5_export/") and name.endswith(".safetensors") and damage is flip
        again = damage is delete and name == LAST_MARK
        assert name in HARMLESS or unread or again, f"{name} was used"
        assert same_results(copy, finished), name


def same_results(made, other):
    """Whether two runs have measured and reported the same."""
    figures = [
        json.loads((m.folder / "6_evaluate/results.json").read_text()) for m in (made, other)
    ]
    measured = [[f["dense"]["loss"], f["moe"]["loss"]] for f in figures]
    reports = [(m.folder / "7_report/report.md").read_text().count("\n") for m in (made, other)]
    return all(pair[0] == pair[1] for pair in (measured, reports))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_export_is_not_evaluated(damage, finished, tmp_path, capfd):
    for name in finished.files():
        if not name.startswith("5_export/") or name in HARMLESS:
            continue
        copy = damaged(finished, name, damage, tmp_path / "run")
        options = ["--text", str(copy.text), "--max-tokens", "64"]
        line = refusal(["evaluate", str(copy.folder), *options], capfd)
        assert line is not None, f"{name} was used"
        assert name.removeprefix("5_export/") in line or "tokenizer" in line, f"{name}: {line}"


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_an_export_reads_of_a_run_is_checked(damage, finished, tmp_path, capfd):
    for name in (
        "config.json",
        "0_data/heldout.safetensors",
        "3_extract/layout.safetensors",
        "finished/data",
        "finished/extract",
    ):
        copy = damaged(finished, name, damage, tmp_path / "run")
        line = refusal(["export", str(copy.folder), str(tmp_path / "again")], capfd)
        assert line is not None, f"{name} was used"
        assert name in line or "no run with a finished" in line
        assert not (tmp_path / "again").exists()


@pytest.mark.slow
@pytest.mark.parametrize("damage", [flip, truncate, empty, delete])
def test_an_interrupted_run_goes_on_without_what_is_damaged(
    damage, interrupted, finished, tmp_path, capfd
):
    """Checkpoints fall back or are refused; metrics.jsonl is a log on which nothing depends."""
    expected = finished.learned()
    for name in interrupted.files():
        if damage is not delete and not (interrupted.folder / name).stat().st_size:
            continue
        copy = damaged(interrupted, name, damage, tmp_path / "run")
        line = refusal(copy.command(), capfd)
        if line is None:
            again = damage is delete and name == "finished/calibrate"
            assert again or name.startswith(("2_align/", ".lock")), f"{name} was used"
            assert copy.learned() == expected, name
        else:
            assert names_the_file(line, name) or "2_align/checkpoints" in line, f"{name}: {line}"


@pytest.mark.parametrize("name", ["1_calibrate/state.safetensors", "finished/align"])
def test_the_remedy_in_the_message_mends_the_run(name, finished, tmp_path, capfd):
    copy = damaged(finished, name, flip, tmp_path / "run")
    line = refusal(copy.command(), capfd)
    marks, folder = re.search(r"Delete ([\w, ]+) in (\S+) and repeat the command", line).groups()
    for mark in marks.split(", "):
        (copy.folder.parent / folder / mark).unlink()
    assert refusal(copy.command(), capfd) is None
    assert copy.learned() == finished.learned()


def test_a_lost_marker_below_others_is_told(finished, tmp_path, capfd):
    copy = damaged(finished, "finished/calibrate", delete, tmp_path / "run")
    assert "finished/calibrate is missing, though align" in refusal(copy.command(), capfd)


def test_a_k_changed_by_hand_is_told_and_settled_by_edit(finished, tmp_path, capfd):
    copy = finished.copied_to(tmp_path / "run")
    path = copy.folder / "5_export" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"num_experts_per_tok": 5}, indent=2))
    evaluate = ["evaluate", str(copy.folder), "--text", str(copy.text), "--max-tokens", "64"]
    assert "dotmoe edit" in refusal(evaluate, capfd)
    assert run(["edit", str(copy.folder), "--active-experts", "5"]) == 0
    assert refusal(evaluate, capfd) is None
