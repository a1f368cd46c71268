"""What a run folder takes up, refuses, and leaves behind. Oracle: the files, byte by byte."""

import dataclasses
import fcntl
import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from dotmoe.checkpoint.folder import fingerprint
from dotmoe.cli import run
from dotmoe.config import FinetuneRunConfig, RunConfig
from dotmoe.errors import UserError
from dotmoe.options import identity
from dotmoe.pipeline import convert
from dotmoe.progress import Progress
from dotmoe.recipes import recipe
from dotmoe.run_folder import RunFolder

HOW = ["out", "training", "load.device", "load.sharding"]
HOW_OF = {
    "convert": [*HOW, "align.micro_batch_size", "align.activation_checkpointing"],
    "finetune": [*HOW, "run", "finetune.micro_batch_size", "finetune.activation_checkpointing"],
}


@pytest.mark.parametrize("command", HOW_OF)
def test_what_only_says_how_is_no_part_of_the_identity(command):
    cls, source = (RunConfig, "model") if command == "convert" else (FinetuneRunConfig, "run")
    config = cls(**{source: "s", "out": "o"})
    for path in HOW_OF[command]:
        values, place = identity(config), config
        *parents, name = path.split(".")
        for parent in parents:
            values, place = values[parent], getattr(place, parent)
        assert hasattr(place, name)
        assert name not in values


def test_a_run_is_taken_up_with_another_way_to_make_it(finished, tmp_path):
    made = finished.copied_to(tmp_path / "run")
    assert run(made.command(checkpoint_every=5, micro_batch_size=1)) == 0
    values = json.loads((made.folder / "config.json").read_text())
    assert (values["command"], values["seed"]) == ("convert", 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"lr": 2e-2}, "another config"), ({"seed": 1}, "another config")],
)
def test_another_aim_is_refused(options, words, finished, command, tmp_path):
    made = finished.copied_to(tmp_path / "run")
    before = made.contents()
    assert words in command(*made.command(**options)).refusal()
    assert made.contents() == before


def test_a_run_of_another_command_is_refused(finetuned, finished, command, tmp_path):
    made = finetuned.copied_to(tmp_path / "run")
    line = command(*finished.at(made.folder).command()).refusal()
    assert "holds a run of dotmoe finetune, not of dotmoe convert" in line
    config = made.folder / "config.json"
    line = command("convert", finished.source, tmp_path / "new", config=config).refusal()
    assert "is the config of a dotmoe finetune" in line


def test_the_same_config_from_python_goes_on_with_lists_for_tuples(finished, tmp_path):
    made = finished.copied_to(tmp_path / "run")
    values = json.loads((made.folder / "config.json").read_text())
    config = RunFolder(made.folder).config(RunConfig)
    assert isinstance(values["data"]["data"], list)
    names = [field.name for field in dataclasses.fields(RunConfig)]
    config = recipe(**{name: getattr(config, name) for name in names})
    object.__setattr__(config.data, "data", values["data"]["data"])
    before = made.contents("config.json", "manifest.json", ".lock")
    assert convert(config).results
    after = made.contents("config.json", "manifest.json", ".lock")
    assert {n: c for n, c in before.items() if n[0] != "7"} == {
        n: c for n, c in after.items() if n[0] != "7"
    }


def test_a_second_process_is_refused_before_it_writes_anything(finished, command, tmp_path):
    made = finished.copied_to(tmp_path / "run")
    before = made.contents()
    with (made.folder / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        # Another number of checkpoints would be allowed, and would be written into the config.
        assert "another dotmoe process" in command(*made.command(checkpoint_every=5)).refusal()
    assert made.contents() == before


def test_the_tokenizer_is_part_of_the_models_fingerprint(finished, tmp_path):
    model = shutil.copytree(finished.source, tmp_path / "model")
    assert fingerprint(model) == fingerprint(finished.source)
    with (model / "tokenizer.json").open("a") as file:
        file.write(" ")
    assert fingerprint(model) != fingerprint(finished.source)


def test_a_model_that_changed_since_is_refused(finished, command, tmp_path):
    model = shutil.copytree(finished.source, tmp_path / "model")
    made = finished.copied_to(tmp_path / "run")
    arguments = ["convert", model, *made.command()[2:]]
    assert "another config" in command(*arguments).refusal()  # the model's name is part of it
    weights = load_file(model / "model.safetensors")
    save_file({n: 2 * w for n, w in weights.items()}, model / "model.safetensors")
    shutil.rmtree(made.folder)
    assert command(*arguments).status == 0
    save_file(weights, model / "model.safetensors")
    assert "files have changed" in command(*arguments).refusal()
    assert "files have changed" in command("export", made.folder, tmp_path / "again").refusal()


def test_a_finetune_is_not_taken_up_from_another_run(finished, finetuned, command, tmp_path):
    """Of the same model, config and command: only the experts of RUN are others."""
    other = finished.at(tmp_path / "other", seed=3).made()
    made = finetuned.copied_to(tmp_path / "run")
    (made.folder / "6_evaluate/results.json").unlink()
    arguments = ["finetune", other.folder, *made.command()[2:]]
    assert "was started from another run" in command(*arguments).refusal()
    moved = finished.copied_to(tmp_path / "moved")
    assert command("finetune", moved.folder, *made.command()[2:]).status == 0


def test_a_folder_that_is_gone_is_made_again_and_all_that_follows(finished, tmp_path, capfd):
    made = finished.copied_to(tmp_path / "run")
    tasks = made.folder / "6_evaluate/samples/mine.txt"
    tasks.parent.mkdir()
    tasks.write_text("mine")
    for folder in ("2_align", "5_export"):
        shutil.rmtree(made.folder / folder)
    assert run(made.command()) == 0
    said = capfd.readouterr().err
    assert "2_align is gone: it is made again" in said
    assert "calibrate (data)" not in said
    assert made.tensors() == finished.tensors()
    assert tasks.exists(), "what other commands measured is theirs"


def test_a_finished_run_needs_neither_its_data_nor_its_model_in_memory(
    finished, tmp_path, monkeypatch
):
    made = finished.copied_to(tmp_path / "run")
    shutil.rmtree(made.folder / "0_data")

    def load(*arguments):
        raise AssertionError("loaded")

    monkeypatch.setattr("dotmoe.pipeline.load_dense", load)
    assert run(made.command()) == 0
    assert not (made.folder / "0_data").exists()


def test_the_manifest_says_what_each_stage_left(finished):
    folder = RunFolder(finished.folder)
    stages = folder.manifest["stages"]
    assert list(stages) == ["data", "calibrate", "align", "extract", "export", "evaluate"]
    assert set(stages["align"]["files"]) == {"metrics.jsonl", "state.safetensors"}
    assert stages["export"]["files"] == {}
    assert folder.seconds("align", "extract") > 0
    assert folder.seconds("finetune") is None


def stopping_at(title, done):
    """Progress that is interrupted, as by Ctrl-C, when a bar has come so far."""

    class Stopping(Progress):
        def bar(self, bar_title):
            class Bar:
                def __enter__(self):
                    return self

                def __exit__(self, *error):
                    return None

                def __call__(self, now, total=0, note=""):
                    if bar_title == title and now >= done:
                        raise KeyboardInterrupt

            return Bar()

    return Stopping(quiet=True)


def test_an_interrupt_keeps_sampled_batches_and_the_run_goes_on_from_them(finished, tmp_path):
    out = tmp_path / "run"
    options = {"data": "self", "sample_batch_size": 2, "steps": 2}
    made = finished.at(out, **options)
    whole = finished.at(tmp_path / "whole", **options).made()
    config = RunFolder(whole.folder).config(RunConfig)
    object.__setattr__(config, "out", str(out))
    with pytest.raises(KeyboardInterrupt):
        convert(config, stopping_at("sample from the dense model", 100))
    parts = sorted((out / "0_data").glob("*.parts/*"))
    assert parts
    times = [part.stat().st_mtime_ns for part in parts]
    with pytest.raises(KeyboardInterrupt):
        convert(config, stopping_at("sample from the dense model", 200))
    assert [part.stat().st_mtime_ns for part in parts] == times
    assert run(made.command()) == 0
    assert made.tensors() == whole.tensors()


def test_what_finished_nothing_leaves_nothing_but_a_users_files(finished, tmp_path):
    config = RunFolder(finished.folder).config(RunConfig)
    out = tmp_path / "run"
    object.__setattr__(config, "out", str(out))
    with pytest.raises(KeyboardInterrupt):
        convert(config, stopping_at("tokenise", 0))
    assert not out.exists()

    class Writing(Progress):
        def bar(self, title):
            (out / "notes.txt").write_text("mine")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(config, Writing(quiet=True))
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    with pytest.raises(UserError, match="in the way"):
        convert(config)
