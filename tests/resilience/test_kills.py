"""SIGKILL at any moment: the same command goes on, and ends as if nothing had happened.

Oracle: a run that nobody killed, bit by bit. Processes are real; moments are seeded, and found from
outside by what appears on disk.
"""

import json
import random

import pytest

from runs import Forked

CHECKPOINT_EVERY = 3
LONGER = {"steps": 36, "checkpoint_every": CHECKPOINT_EVERY}
QUICK = ("step", "checkpoint", "export")
ALL = (
    *("start", "data", "data", "calibrate", "calibrate"),
    *("step", "checkpoint") * 5,
    *("step", "export", "verify", "evaluate", "evaluate"),
)
DELAY_S = {"start": 0.3, "step": 0.05, "checkpoint": 0.02, "export": 0.1}
"""How long after its sign a moment may be, at most; 0.05 s where nothing is said."""


class Watched:
    """A run folder seen from outside."""

    def __init__(self, made):
        self.made = made
        self.folder = made.folder
        self.align = made.folder / "2_align"

    def steps(self):
        """Whole lines of the metrics, one a step."""
        file = self.align / "metrics.jsonl"
        return file.read_bytes().split(b"\n")[:-1] if file.exists() else []

    def has_a_checkpoint(self):
        return any(self.align.glob("checkpoints/step_*"))

    def is_writing_a_checkpoint(self):
        return any(self.align.glob("checkpoints/.step_*.partial"))

    def is_exporting(self):
        return any(self.folder.glob(".5_export*.partial"))

    def is_verifying(self):
        return any(self.folder.glob(".5_export*.partial/*.safetensors"))

    def sign_of(self, moment):
        """Condition after which the process is killed."""
        enough = len(self.steps()) + CHECKPOINT_EVERY
        return {
            "start": lambda: True,
            "data": (self.folder / "0_data").exists,
            "calibrate": (self.folder / "1_calibrate").exists,
            "step": lambda: len(self.steps()) > enough or self.is_exporting(),
            "checkpoint": lambda: (
                (self.has_a_checkpoint() and self.is_writing_a_checkpoint()) or self.is_exporting()
            ),
            "export": self.is_exporting,
            "verify": self.is_verifying,
            "evaluate": (self.folder / "6_evaluate").exists,
        }[moment]

    def moment(self):
        """What a process that is no longer there was doing, by what it left."""
        manifest = self.folder / "manifest.json"
        finished = json.loads(manifest.read_text())["stages"] if manifest.exists() else {}
        if self.is_writing_a_checkpoint():
            return "checkpoint"
        if self.is_exporting():
            return "verify" if self.is_verifying() else "export"
        for stage, folder in (("evaluate", "6_evaluate"), ("step", "2_align")):
            if (self.folder / folder).exists() and stage not in finished:
                return stage
        return "calibrate" if "data" in finished else "data"


def killed_often(made, moments, seed=0):
    """Kill and go on, once for every moment; then let it end. Returns the moments that were hit."""
    generator = random.Random(seed)
    watched = Watched(made)
    hit = []
    for moment in moments:
        before = watched.steps()
        process = Forked(made.command())
        delay_s = generator.uniform(0, DELAY_S.get(moment, 0.05))
        assert process.kill_when(watched.sign_of(moment), delay_s), process.said()
        require_few_steps_again(before, watched.steps())
        hit.append(watched.moment())
    before = watched.steps()
    process = Forked(made.command())
    assert process.wait() == 0, process.said()
    require_few_steps_again(before, watched.steps())
    return hit


def require_few_steps_again(before, after):
    """Lines hold the seconds of a step: a step that was taken again has another one."""
    same = sum(one == other for one, other in zip(before, after, strict=False))
    assert len(before) - same <= CHECKPOINT_EVERY


def require_same(made, whole):
    """All that is learned, exported and measured is the same, bit for bit."""
    assert made.tensors() == whole.tensors()
    assert [steps_of(made), results_of(made)] == [steps_of(whole), results_of(whole)]
    for name in whole.files():
        if name.startswith("5_export/"):
            assert (made.folder / name).read_bytes() == (whole.folder / name).read_bytes(), name
    assert set(made.files()) == set(whole.files())


def steps_of(made):
    """Metrics of every step, without their times."""
    lines = (made.folder / "2_align/metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def results_of(made):
    """Everything measured, without what names the run or the day."""
    results = json.loads((made.folder / "6_evaluate/results.json").read_text())
    return {k: v for k, v in results.items() if k not in ("config", "provenance")}


@pytest.fixture(scope="module")
def whole(finished, tmp_path_factory):
    """A run in one go, in a process of its own."""
    made = finished.at(tmp_path_factory.mktemp("whole") / "run", **LONGER)
    process = Forked(made.command())
    assert process.wait() == 0, process.said()
    return made


def test_three_kills_change_nothing(whole, finished, tmp_path):
    made = finished.at(tmp_path / "run", **LONGER)
    hit = killed_often(made, QUICK)
    assert len(hit) == len(QUICK)
    require_same(made, whole)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_twenty_kills_change_nothing(seed, whole, finished, tmp_path):
    made = finished.at(tmp_path / "run", **LONGER)
    hit = killed_often(made, ALL, seed)
    assert len(hit) == len(ALL) == 20
    assert {"step", "checkpoint", "evaluate"} < set(hit), hit
    assert {"export", "verify"} & set(hit), hit
    require_same(made, whole)
