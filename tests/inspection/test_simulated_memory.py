"""The planner's memory beside that of the steps themselves, run on fake tensors at 7B width."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "simulated_memory.py"


def test_the_peaks_of_steps_at_7b_width_are_planned_within_15_percent():
    # Another process: types of tensors are not checked there, which fake ones would fail.
    line = [sys.executable, str(SCRIPT), "--layers", "2"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    rows = [json.loads(row) for row in done.stdout.splitlines()]
    assert len(rows) == 2 + 6 * 2
    for row in rows:
        assert row["planned"] == pytest.approx(row["simulated"], rel=0.15), row
