"""A full disk at every stage: the same command goes on. Oracle: a run that nothing stopped.

Processes are real; that the disk is full is a limit on the size of the process's files, set from
outside when a stage begins. Kills at every stage are in `contract/test_contract_runs.py`.
"""

import resource
import sys

import pytest

from runs import Forked, slow_but

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


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")
@pytest.mark.parametrize("stage", slow_but(QUICK, STAGES))
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
