"""`make gpu-evidence`: every part at tiny size on the CPU, and what a stop or a failure leaves."""

import importlib
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ("11,008 x 86", "14,336 x 112", "18,944 x 148", "27,648 x 216")
STATES = [f"{r} 0.5 {s}" for s in ("frozen", "repaired", "finetuned") for r in ("default", "paper")]
POINTS = {
    "tests": ["export", "solver", "pytest"],
    "assignment": ["masked activation", "soft top-k", *SHAPES],
    "alignment": ["step"],
    "finetune": ["1/8", "1/4", "1/2"],
    "serving": [*(f"mixtral {experts}" for experts in (8, 16, 74, 148)), "glm4_moe 148"],
    "real": ["pace", "dense", *STATES, *(f"{name}, tasks" for name in ("dense", *STATES[-2:]))],
}


@pytest.fixture
def driver(monkeypatch):
    """benchmarks/gpu_evidence.py, whose folder is no package."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("gpu_evidence")


@pytest.mark.slow
def test_every_part_is_rehearsed_and_has_its_goals(driver, tmp_path):
    for package in ("triton", "gguf", "lm_eval"):
        pytest.importorskip(package)
    out = tmp_path / "out"
    command = [sys.executable, "benchmarks/gpu_evidence.py", "--rehearse", "--out", str(out)]
    run = subprocess.run(
        [*command, "--work", str(tmp_path / "work")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    records = {file.stem: json.loads(file.read_text()) for file in out.iterdir()}
    assert {part: list(record["points"]) for part, record in records.items()} == POINTS
    for record in records.values():
        assert (record["origin"], record["failed"]) == ("rehearsed", {})
        assert record["seconds"] > 0
        for point in record["points"].values():
            assert {"found", "seconds", "gpu", "provenance"} == set(point)
    rows = driver.gpu_goals.verdicts(out)
    assert {row["part"] for row in rows} == set(POINTS)
    for row in rows:
        is_left_out = row["what"].startswith("25%")
        assert (row["verdict"] == "not measured") == is_left_out == (row["measured"] is None)
        if row["measured"] is not None:
            assert math.isfinite(row["measured"])
            meets = row["measured"] <= row["limit"]
            if row["rule"] == "least":
                meets = row["measured"] >= row["limit"]
            assert row["verdict"] == ("met" if meets else "missed")
    assert run.stdout.count("not measured") == sum(row["measured"] is None for row in rows)


class Restarted(BaseException):
    """The process would start itself again."""


def test_a_stop_or_a_failure_keeps_what_is_there_and_the_next_call_goes_on(
    driver, tmp_path, monkeypatch
):
    calls, is_slow = [], True

    def point(name):
        def measure():
            calls.append(name)
            if name == "wrong":
                raise ValueError("a device\nis lost")
            if name == "long" and is_slow:
                time.sleep(60)
            return {"is": name}

        return measure

    def again(call):
        raise Restarted(call)

    names = ("first", "wrong", "second", "long", "last")
    monkeypatch.setattr(driver, "start_again", again)
    monkeypatch.setitem(driver.POINTS, "alignment", lambda at: {n: point(n) for n in names})
    settings = driver.Settings(out=tmp_path, work=tmp_path, rehearse=True)

    def run(seconds):
        """What is kept after a call, and what has failed."""
        start = time.monotonic()
        call = driver.Call(deadline=start + seconds)
        while True:
            try:
                driver.run("alignment", settings, call)
            except Restarted as restarted:
                (call,) = restarted.args
            else:
                break
        assert time.monotonic() - start < 30
        record = json.loads((tmp_path / "alignment.json").read_text())
        found = [point["found"]["is"] for point in record["points"].values()]
        return found, record["failed"]

    lost = {"wrong": "ValueError: a device is lost"}
    kept, failed = run(2)
    assert (kept, set(failed)) == (["first", "second"], {"wrong", "long"})
    is_slow = False
    assert run(60) == (["first", "second", "long", "last"], lost)
    assert [calls.count(name) for name in names] == [1, 2, 1, 2, 1]
    monkeypatch.setitem(driver.BUDGETS, "alignment", 0)
    assert run(60)[1] == lost
    assert calls.count("wrong") == 2


def test_a_commit_with_changes_is_refused(driver, tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "require_device", lambda device: None)
    settings = driver.Settings(out=tmp_path / "out", work=tmp_path / "work")
    for found in (None, "abc+changes"):
        monkeypatch.setattr(driver, "commit", lambda found=found: found)
        with pytest.raises(SystemExit, match="Commit all changes"):
            driver.prepare(settings)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(driver, "commit", lambda: "abc")
    driver.prepare(settings)


def test_pieces_of_a_model_are_joined(driver, tmp_path):
    pieces = tuple(tmp_path / f"model.gguf.{n}" for n in (0, 1))
    for piece in pieces:
        piece.write_bytes(piece.suffix.encode() * 5)
    whole = driver.real_model.joined(pieces, tmp_path)
    assert (whole.name, whole.read_bytes()) == ("model.gguf", b".0" * 5 + b".1" * 5)
