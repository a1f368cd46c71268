"""Logs. Oracles: TensorBoard's own reader, and a package that stands in for wandb."""

import json
import sys
from dataclasses import replace

import pytest
from toy_tasks import EVERY_5, SCHEDULE, Regression

from dotmoe.errors import UserError
from dotmoe.options import check
from dotmoe.recipes import recipe
from dotmoe.training.loop import TrainingConfig, train

FAKE = """
import json, os

class errors:
    class Error(Exception):
        pass

class Run:
    def __init__(self, options):
        self.file = open(os.path.join(options["dir"], "wandb_calls.jsonl"), "a")
        self.file.write(json.dumps(["init", options]) + "\\n")

    def log(self, values, step):
        self.file.write(json.dumps(["log", step, values]) + "\\n")

    def finish(self):
        self.file.close()

def init(**options):
    if os.environ.get("WANDB_MODE") != "offline":
        raise errors.Error("api_key not configured")
    return Run(options)
"""


@pytest.fixture
def wandb(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("packages")
    (folder / "wandb.py").write_text(FAKE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("WANDB_MODE", "offline")
    yield
    sys.modules.pop("wandb", None)


def interrupt(task, metrics):
    raise KeyboardInterrupt


def run_twice(folder, log_to):
    """Interrupted after 8 steps, of which 5 are in the checkpoint; then to the end."""
    config = TrainingConfig(checkpoint_every=5, log_to=log_to)
    with pytest.raises(KeyboardInterrupt):
        train(Regression({8: interrupt}), SCHEDULE, folder, config)
    train(Regression(), SCHEDULE, folder, config)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_tensorboard_has_every_step_once(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    lines = run_twice(tmp_path, ("tensorboard",))
    events = reader.EventAccumulator(str(tmp_path / "tensorboard"), purge_orphaned_data=True)
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "grad_norm", "lr_factor", "seconds"}
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert found == [(line["step"], pytest.approx(line["loss"], rel=1e-6)) for line in lines]
    assert len(found) == SCHEDULE.steps


def test_wandb_goes_on_with_the_same_run(tmp_path, wandb):
    lines = run_twice(tmp_path, ("wandb",))
    calls = [json.loads(c) for c in (tmp_path / "wandb_calls.jsonl").read_text().splitlines()]
    starts = [call[1] for call in calls if call[0] == "init"]
    assert len(starts) == 2
    assert starts[0] == starts[1]
    assert (starts[0]["project"], starts[0]["resume"]) == ("dotmoe", "allow")
    logged = {step: values for name, step, values in (c for c in calls if c[0] == "log")}
    assert [{"step": step, **values} for step, values in sorted(logged.items())] == lines


def test_wandb_that_cannot_start_says_what_to_do(tmp_path, wandb, monkeypatch):
    monkeypatch.delenv("WANDB_MODE")
    with pytest.raises(UserError, match=r"api_key not configured.*WANDB_MODE=offline"):
        train(Regression(), SCHEDULE, tmp_path, TrainingConfig(log_to=("wandb",)))


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_said_before_anything_is_loaded(name, tmp_path, monkeypatch):
    monkeypatch.setattr("dotmoe.training.loop.find_spec", lambda package: None)
    training = TrainingConfig(log_to=(name,))
    pattern = rf"log_to names {name}, which is not installed. .*dotmoe\[{name}\]"
    with pytest.raises(UserError, match=pattern):
        train(Regression(), SCHEDULE, tmp_path, training)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match=pattern):
        check(replace(recipe("quickstart"), training=training))


def test_nothing_but_the_file_is_written_unless_asked(tmp_path):
    train(Regression(), SCHEDULE, tmp_path, EVERY_5)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", "metrics.jsonl"}
