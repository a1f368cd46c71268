"""`benchmarks/gpu.py`: limits, results one by one, answers, and what travels."""

import io
import json
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

import gpu_real
import pack_for_gpu
from gpu_part import Asked, Part
from rounds import in_turns

ROOT = Path(__file__).resolve().parents[2]


def asked_for(out, seconds):
    return Asked(out=out, files=None, scratch=out, seconds=seconds, device="cpu", tiny=False)


def test_each_result_is_written_at_once_and_no_failure_ends_a_part(tmp_path):
    part = Part("some", asked_for(tmp_path, seconds=60))

    def written():
        return json.loads((tmp_path / "some.json").read_text())

    assert part.measure("good", lambda: {"value": 3}, most=10) == {"value": 3}
    assert written()["good"]["value"] == 3
    assert part.measure("bad", lambda: {"value": 1 / 0}, most=10) is None
    assert written()["bad"]["failed"] == "ZeroDivisionError: division by zero"
    started = time.monotonic()
    assert part.measure("long", lambda: time.sleep(30) or {}, most=3) is None
    assert time.monotonic() - started < 15
    assert "stopped after 3 s" in written()["long"]["failed"]
    assert part.measure("last", lambda: {"value": 4}, most=10) == {"value": 4}
    assert [*written()][:6] == ["origin", "tiny", "good", "bad", "long", "last"]


def test_a_part_whose_time_is_over_measures_nothing_more(tmp_path):
    part = Part("some", asked_for(tmp_path, seconds=1))
    assert part.measure("late", lambda: pytest.fail("it ran"), most=10) is None
    assert json.loads((tmp_path / "some.json").read_text())["late"]["failed"] == "no time was left"


def test_rounds_end_after_their_seconds_but_one_is_counted():
    counts = [len(in_turns({"one": lambda: 1}, 4, seconds)["one"]) for seconds in (0, 60)]
    assert counts == [1, 4]


ADD = {
    "prompt": "def add(a, b):\n",
    "test": "def check(add):\n    assert add(2, 3) == 5\n",
    "entry_point": "add",
}


@pytest.mark.parametrize(
    ("name", "row", "text", "is_right"),
    [
        ("gsm8k", {"answer": "so 1,000 + 20\n#### 1,020"}, "That is 1000 and 20: 1020.", True),
        ("gsm8k", {"answer": "#### 18"}, "The answer is 18.00 dollars", True),
        ("gsm8k", {"answer": "#### 18"}, "It is 18.\nQuestion: what is 3 + 4?", True),
        ("gsm8k", {"answer": "#### 18"}, "18 eggs, so 9 each", False),
        ("gsm8k", {"answer": "#### 18"}, "I do not know", False),
        ("humaneval", ADD, "    return a + b\n\ndef other():\n    never closed (", True),
        ("humaneval", ADD, "    return a - b\n", False),
        ("humaneval", ADD, "    return (", False),
    ],
)
def test_answers_are_checked_by_their_number_or_their_test(name, row, text, is_right):
    assert [*gpu_real.checked(name, [row], [text])] == [is_right]


def test_pieces_join_to_what_was_packed(tmp_path):
    files, out = tmp_path / "files", tmp_path / "out"
    (files / "model").mkdir(parents=True)
    (files / "model/config.json").write_text("{}")
    (files / "text.txt").write_bytes(bytes(range(256)) * 400)
    pieces = pack_for_gpu.written(files, out, largest=50_000)
    assert [*map(str, pieces)] == [*map(str, sorted(out.iterdir()))]
    assert max(piece.stat().st_size for piece in pieces) == 50_000
    joined = io.BytesIO(b"".join(piece.read_bytes() for piece in pieces))
    with tarfile.open(fileobj=joined) as tar:
        tar.extractall(tmp_path / "back", filter="data")
    for name in ("model/config.json", "text.txt"):
        assert (tmp_path / "back" / name).read_bytes() == (files / name).read_bytes()


@pytest.mark.slow
def test_a_rehearsal_measures_everything(tmp_path):
    line = [sys.executable, str(ROOT / "benchmarks/gpu.py"), str(tmp_path / "out"), "--tiny"]
    line += ["--scratch", str(tmp_path / "scratch")]
    subprocess.run(line, check=True, timeout=800)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        f"{part}.{kind}" for part in ("proof", "shapes", "real") for kind in ("json", "log")
    }
    for file in (tmp_path / "out").glob("*.json"):
        for name, row in json.loads(file.read_text()).items():
            assert "failed" not in (row if isinstance(row, dict) else {}), (file, name, row)
