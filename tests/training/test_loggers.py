"""Logs. Oracles: TensorBoard's own reader, and a package that stands in for wandb."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from toy_tasks import SCHEDULE, interrupt, lines_in, trained

from dotmoe.common.errors import UserError
from dotmoe.common.options import check
from dotmoe.run.config import recipe
from dotmoe.training.config import TrainingConfig


@pytest.fixture
def wandb(monkeypatch):
    """Calls of a stand-in for the package."""
    calls = []

    def init(**options):
        calls.append(("init", options))
        log = lambda values, step: calls.append(("log", step, values))  # noqa: E731
        return SimpleNamespace(log=log, finish=lambda: None)

    errors = SimpleNamespace(Error=RuntimeError)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, errors=errors))
    monkeypatch.setattr("dotmoe.common.errors.find_spec", lambda package: True)
    return calls


def run_twice(folder, log_to):
    """Interrupted after 8 steps, of which 5 are in the checkpoint; then to the end."""
    config = TrainingConfig(checkpoint_every=5, log_to=log_to)
    with pytest.raises(KeyboardInterrupt):
        trained(folder, {8: interrupt}, config)
    trained(folder, training=config)
    return lines_in(folder)


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
    first, second = (call[1] for call in wandb if call[0] == "init")
    assert first == second
    assert (first["project"], first["resume"]) == ("dotmoe", "allow")
    logged = {call[1]: call[2] for call in wandb if call[0] == "log"}
    assert [{"step": step, **values} for step, values in sorted(logged.items())] == lines


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_said_before_anything_is_loaded(name, monkeypatch):
    monkeypatch.setattr("dotmoe.common.errors.find_spec", lambda package: None)
    training = TrainingConfig(log_to=(name,))
    with pytest.raises(UserError, match=rf"log_to {name} needs the {name} package, .*\.\[{name}\]"):
        check(replace(recipe("quickstart"), training=training))
