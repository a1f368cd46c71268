"""Which runs are the same: what is made counts, how it is made does not."""

import json

import pytest

from dotmoe.cli import run
from dotmoe.config import RunConfig, from_json, identity
from dotmoe.recipes import recipe_named


@pytest.mark.parametrize("path", RunConfig.only_how)
def test_what_only_says_how_is_a_field_and_no_part_of_the_identity(path):
    config = recipe_named("default")
    place = config
    for name in path.split("."):
        place = getattr(place, name)  # a field that was renamed would be an error here
    values = identity(config)
    *parents, name = path.split(".")
    for parent in parents:
        values = values[parent]
    assert name not in values


def test_a_run_is_taken_up_with_another_way_to_make_it(finished, tmp_path):
    made = finished.copied_to(tmp_path / "run")
    assert run(made.command("--checkpoint-every", "5", "--micro-batch-size", "1")) == 0
    config = from_json(made.folder / "config.json", RunConfig)
    assert (config.training.checkpoint_every, config.align.micro_batch_size) == (5, 1)


def test_another_aim_is_refused(finished, tmp_path, capfd):
    made = finished.copied_to(tmp_path / "run")
    assert run(made.command("--lr", "2e-2")) == 2
    assert "another config" in capfd.readouterr().err


def test_the_config_names_its_command_and_an_old_one_without_is_of_convert(finished, tmp_path):
    made = finished.copied_to(tmp_path / "run")
    path = made.folder / "config.json"
    values = json.loads(path.read_text())
    assert values.pop("command") == "convert"
    del values["sha256"]
    path.write_text(json.dumps(values))
    assert run(made.command()) == 0


def test_a_folder_of_another_command_is_refused(finished, tmp_path, capfd):
    made = finished.copied_to(tmp_path / "run")
    path = made.folder / "config.json"
    values = json.loads(path.read_text()) | {"command": "finetune"}
    del values["sha256"]
    path.write_text(json.dumps(values))
    assert run(made.command()) == 2
    assert "holds a run of dotmoe finetune, not of dotmoe convert" in capfd.readouterr().err
