"""SIGKILL at any moment and a full disk at every stage: the same command goes on.

Oracle: a run that nothing stopped, bit by bit. Processes are real; that the disk is full is a limit
on the size of the process's files, set from outside when a stage begins.
"""

import json
import random
import resource
import sys

import pytest

from runs import Forked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")
CHECKPOINT_EVERY = 3
FEW_BYTES = 64
STAGES = {
    "start": "run",
    "data": "run/0_data",
    "calibrate": "run/1_calibrate",
    "align": "run/2_align/metrics.jsonl",
    "checkpoint": "run/2_align/checkpoints/.step_*.partial",
    "second checkpoint": "run/2_align/checkpoints/step_*",
    "extract": "run/3_extract",
    "export": "run/.5_export*.partial",
    "evaluate": "run/6_evaluate",
}
"""What appears on disk when each begins."""
QUICK = ("second checkpoint", "evaluate")


def results_of(made):
    """Everything measured, without what names the run or the day."""
    results = json.loads((made.folder / "6_evaluate/results.json").read_text())
    return {name: value for name, value in results.items() if name not in ("config", "provenance")}


@pytest.mark.parametrize(
    "stage",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in STAGES],
)
def test_a_full_disk_is_said_and_nothing_is_lost(stage, finished, tmp_path):
    made = finished.at(tmp_path / "run")
    process = Forked(made.command())
    assert process.is_there_when(lambda: any(tmp_path.glob(STAGES[stage]))), process.said()
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (FEW_BYTES, resource.RLIM_INFINITY))
    assert process.wait() == 2, process.said()
    said = process.said()
    assert said.count("dotmoe: error: ") == 1
    assert "Traceback" not in said
    assert "full" in said or "room" in said, said
    assert not list(made.folder.rglob(".step_*")), "a half-written checkpoint is left"
    assert Forked(made.command()).wait() == 0
    assert made.tensors() == finished.tensors()


@pytest.mark.slow
def test_kills_at_random_moments_change_nothing(finished, tmp_path):
    options = {"steps": 150, "checkpoint_every": CHECKPOINT_EVERY}
    whole = finished.at(tmp_path / "whole", **options)
    assert Forked(whole.command()).wait() == 0
    made, moments, kills, before = finished.at(tmp_path / "run", **options), random.Random(1), 0, []
    metrics = made.folder / "2_align/metrics.jsonl"
    # Later and later, until the command comes to its end before.
    while Forked(made.command()).kill_when(lambda: True, moments.uniform(0, 0.2 * (2 + kills))):
        kills += 1
        steps = metrics.read_bytes().split(b"\n")[:-1] if metrics.exists() else []
        # Lines hold the seconds of a step: a step that was taken again has another one.
        same = sum(one == other for one, other in zip(before, steps, strict=False))
        assert len(before) - same <= CHECKPOINT_EVERY
        before = steps
    assert kills > 3
    assert Forked(made.command()).wait() == 0
    assert made.tensors() == whole.tensors()
    assert results_of(made) == results_of(whole)
    assert set(made.files()) == set(whole.files())
    for name in whole.files():
        if name.startswith("5_export/"):
            assert (made.folder / name).read_bytes() == (whole.folder / name).read_bytes(), name
