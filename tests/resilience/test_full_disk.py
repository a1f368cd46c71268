"""No more room, at every stage: one line says so, and the same command goes on.

From outside, the process is suddenly allowed to write only a few bytes of a file: the system
refuses its next write, as a full disk would. Oracle: a run that had room.
"""

import resource
import sys

import pytest

from runs import Forked

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


@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process are Linux's")
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
    again = Forked(made.command())
    assert again.wait() == 0, again.said()
    assert made.tensors() == finished.tensors()
