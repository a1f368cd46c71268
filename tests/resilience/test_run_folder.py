"""What a run folder takes up, refuses, and leaves behind. Oracle: the files, byte by byte."""

import fcntl
import json
import shutil
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from dotmoe.common.errors import UserError
from dotmoe.common.files import read_json
from dotmoe.common.options import what_is_made
from dotmoe.common.progress import Progress
from dotmoe.common.stopwatch import Stopwatch
from dotmoe.models.identity import fingerprint
from dotmoe.models.load import load_dense, load_weights
from dotmoe.pipeline.convert import convert
from dotmoe.run.config import FinetuneRunConfig, RunConfig
from dotmoe.run.finished import FinishedRun
from dotmoe.run.folder import RunFolder
from runs import TINY_FINETUNE, put_into, refusal

HOW = [
    *("out", "training", "load.device", "load.sharding", "align.activation_checkpointing"),
    *("run", "finetune.activation_checkpointing", "finetune.offload", "time", "followed"),
]
"""Options of either command that only say how a run is made."""


def config_of(made, **changes):
    """The config of a run, as Python would be given it."""
    return replace(RunFolder(made.folder).config(RunConfig), **changes)


def test_what_only_says_how_is_no_part_of_the_identity():
    configs = RunConfig(model="s", out="o"), FinetuneRunConfig(run="s", out="o")
    every, kept = (
        {path for config in configs for path in paths_in(of(config))}
        for of in (asdict, what_is_made)
    )
    left_out = {path for path in every - kept if not path.startswith("training.")}
    assert left_out == set(HOW)


def paths_in(values):
    for name, value in values.items():
        yield name
        if isinstance(value, dict):
            yield from (f"{name}.{path}" for path in paths_in(value))


def test_another_way_is_taken_up_and_another_aim_refused(finished, command, tmp_path):
    made = finished.copied_to(tmp_path / "run")
    assert command(*made.command(checkpoint_every=5)).status == 0
    values = json.loads((made.folder / "config.json").read_text())
    assert (values["command"], values["seed"]) == ("convert", 0)
    before = made.contents()
    for options in ({"lr": 2e-2}, {"micro_batch_size": 1}, {"seed": 1}):
        assert f"options: {next(iter(options))} (" in command(*made.command(**options)).refusal()
    with (made.folder / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        # Another interval would be allowed, and would be written into the config.
        assert "another dotmoe process" in command(*made.command(checkpoint_every=4)).refusal()
    assert made.contents() == before


def test_a_run_of_another_command_is_refused(finetuned, finished, command, tmp_path):
    line = command(*finished.at(finetuned.folder).command()).refusal()
    assert "is the config of a dotmoe finetune, not of a dotmoe convert" in line
    config = finetuned.folder / "config.json"
    line = command("convert", finished.source, tmp_path / "new", config=config).refusal()
    assert "is the config of a dotmoe finetune" in line


def test_the_same_config_from_python_goes_on_with_lists_for_tuples(finished, tmp_path):
    made = finished.copied_to(tmp_path / "run")
    config = config_of(made, out=str(made.folder))
    object.__setattr__(config.data, "data", list(config.data.data))
    changing = {"config.json", "manifest.json", ".lock"}
    changing |= {name for name in made.files() if name[0] == "7"}
    before = made.contents(*changing)
    assert convert(config).results
    assert made.contents(*changing) == before


def test_a_model_that_changed_since_is_refused(finished, command, tmp_path):
    model = shutil.copytree(finished.source, tmp_path / "model")
    made = finished.copied_to(tmp_path / "run")
    arguments = ["convert", model, *made.command()[2:]]
    assert "other options: model (" in command(*arguments).refusal()
    weights = load_file(model / "model.safetensors")
    save_file({n: 2 * w for n, w in weights.items()}, model / "model.safetensors")
    shutil.rmtree(made.folder)
    assert command(*arguments).status == 0
    save_file(weights, model / "model.safetensors")
    assert "files have changed" in command(*arguments).refusal()
    assert "files have changed" in command("export", made.folder, tmp_path / "again").refusal()
    before = fingerprint(model)
    with (model / "tokenizer.json").open("a") as file:
        file.write(" ")
    assert fingerprint(model) != before, "the tokenizer is part of the model"


def test_text_that_changed_since_is_refused(finished, command, tmp_path):
    """After any stage that is lost, as in a folder, and also where only the end of it changed."""
    text = tmp_path / "text" / "mine.txt"
    text.parent.mkdir()
    original = Path(finished.options["data"]).read_text()
    text.write_text(original)
    made = finished.at(tmp_path / "run", data=text.parent).made()
    copied = made.copied_to(tmp_path / "copied")
    text.touch()
    assert command(*copied.command()).status == 0, "another time is no change"
    for lost in (None, "5_export", "0_data"):
        if lost:
            shutil.rmtree(copied.folder / lost, ignore_errors=True)
        text.write_text(original[:-2] + "!\n")
        said = command(*copied.command()).refusal()
        assert f"{copied.folder} was started with other text of that name" in said
        text.write_text(original)
        other = text.with_name("other.txt")
        other.write_text("one more")
        assert "other text" in command(*copied.command()).refusal()
        other.unlink()
    assert command(*copied.command()).status == 0
    text.unlink()
    (copied.folder / "6_evaluate/results.json").unlink()
    done = command(*copied.command())
    assert (done.status, "text of the run is gone" in done.err) == (0, True)


@pytest.mark.parametrize("name", ["texts", "mine/texts", "mine.txt"])
def test_text_that_is_gone_is_not_missed_by_what_is_tokenised(
    finished, command, tmp_path, monkeypatch, name
):
    """A folder of a name that a data set of the hub might have, too, and a file."""
    monkeypatch.chdir(tmp_path)
    text = Path(name) if name.endswith(".txt") else Path(name) / "mine.txt"
    text.parent.mkdir(parents=True, exist_ok=True)
    text.write_text(Path(finished.options["data"]).read_text())
    made = finished.at(tmp_path / "run", data=name).made()
    text.unlink()
    if name == "texts":
        text.parent.rmdir()
    elif name == "mine/texts":
        shutil.rmtree("mine")
    shutil.rmtree(made.folder / "5_export")
    done = command(*made.command())
    assert (done.status, "text of the run is gone" in done.err) == (0, True)
    assert made.tensors() == finished.tensors()


def test_text_may_be_mended_until_it_is_tokenised(finished, command, tmp_path, monkeypatch):
    monkeypatch.setattr("dotmoe.text.blocks._KEEP_SECONDS", 0)
    text = tmp_path / "mine.jsonl"
    lines = Path(finished.options["data"]).read_text().splitlines()
    rows = [json.dumps({"text": line}) for line in lines if line]
    text.write_text("\n".join([*rows[:70], "nonsense", *rows[70:]]))
    run = finished.at(tmp_path / "run", data=text)
    assert "is not JSON" in command(*run.command()).refusal()
    assert (run.folder / "manifest.json").exists(), "its tokens are kept"
    text.write_text("\n".join(rows))
    assert command(*run.command()).status == 0


def test_a_finetune_is_not_taken_up_from_another_run(finished, finetuned, command, tmp_path):
    """Of the same model, config and command: only the experts of RUN are others."""
    other = finished.at(tmp_path / "other", seed=3).made()
    made = finetuned.copied_to(tmp_path / "run")
    (made.folder / "6_evaluate/results.json").unlink()
    options = made.command()[2:]
    assert "was started from another run" in command("finetune", other.folder, *options).refusal()
    moved = finished.copied_to(tmp_path / "moved")
    assert command("finetune", moved.folder, *options).status == 0


def test_the_dense_model_has_left_memory_when_the_export_is_loaded(
    finished, command, tmp_path, monkeypatch
):
    dense, seen = [], []

    def loaded_dense(*arguments):
        dense.append(load_dense(*arguments))
        return dense[0]

    def loaded_export(*arguments):
        seen.append({parameter.device.type for parameter in dense[0].model.parameters()})
        return load_weights(*arguments)

    monkeypatch.setattr("dotmoe.pipeline.convert.load_dense", loaded_dense)
    monkeypatch.setattr("dotmoe.measure.evaluate.perplexity.load_weights", loaded_export)
    options = {name: value for name, value in finished.options.items() if name != "no_repair"}
    made = replace(finished, folder=tmp_path / "run", options=options | {"repair_epochs": 0})
    assert command(*made.command()).status == 0
    assert seen == [{"meta"}]
    results = read_json(made.folder / "6_evaluate/results.json")
    assert [*results][:2] == ["dense", "moe"]
    assert results["frozen"]["loss"] != results["dense"]["loss"], "both were measured before"


def test_inputs_are_compared_and_kept_by_name(finished, tmp_path):
    folder, config = RunFolder(finished.copied_to(tmp_path / "run").folder), config_of(finished)
    recorded = {"model": "of its files", "text 2": "of one file"}
    put_into(folder.path / "manifest.json", inputs=recorded)
    folder.begin(config, folder.model, None, {"model": "of its files"})  # its text is gone
    folder.begin(config, folder.model, None, {"text 1": "of what was of the hub"})
    assert RunFolder(folder.path).manifest["inputs"] == recorded
    folder.require_inputs({})
    folder.require_inputs({"text 2": "of one file"})
    line = refusal(folder.begin, config, folder.model, None, {"text 2": "of another"})
    assert "was started with other text of that name: its files have changed since" in line
    assert RunFolder(folder.path).manifest["inputs"]["text 2"] == "of one file"


def test_experts_are_known_by_their_tensors_alone(finished, tmp_path):
    path = finished.copied_to(tmp_path / "run").folder
    before = FinishedRun(path).fingerprints
    stages = read_json(path / "manifest.json")["stages"]
    stages["extract"]["files"] |= {"times.json": {"bytes": 2, "sha256": "of seconds"}}
    put_into(path / "manifest.json", stages=stages)
    assert RunFolder(path).fingerprint_of("extract") == before["experts"]
    stages["extract"]["files"] |= {"layers/weights.safetensors": {"bytes": 2, "sha256": "repaired"}}
    put_into(path / "manifest.json", stages=stages)
    assert RunFolder(path).fingerprint_of("extract") != before["experts"]


def test_a_folder_that_is_gone_is_made_again_and_all_that_follows(finished, command, tmp_path):
    made = finished.copied_to(tmp_path / "run")
    theirs = made.folder / "6_evaluate/samples/mine.txt"
    theirs.parent.mkdir()
    theirs.write_text("mine")
    for folder in ("2_align", "5_export"):
        shutil.rmtree(made.folder / folder)
    said = command(*made.command()).err
    assert "2_align is gone: it is made again" in said
    assert "calibrate (data)" not in said
    assert made.tensors() == finished.tensors()
    assert theirs.exists(), "what other commands measured is theirs"


def test_a_process_whose_folder_was_replaced_writes_nothing_there(finished, tmp_path):
    config = config_of(finished, out=str(tmp_path / "run"))
    run = RunFolder(tmp_path / "run")
    with run.at_work(config):
        run.begin(config, "a model", None, {})
        shutil.rmtree(run.path)
        other = RunFolder(run.path)
        with other.at_work(config):
            other.begin(config, "another model", None, {})
            before = {path.name: path.read_bytes() for path in run.path.iterdir()}
            with pytest.raises(UserError, match="was deleted or replaced"):
                run.run_stage("extract", lambda _: None, lambda _: None)
            assert {path.name: path.read_bytes() for path in run.path.iterdir()} == before


def test_a_process_whose_folder_was_deleted_says_so(finished, tmp_path):
    config = config_of(finished, out=str(tmp_path / "run"))
    run = RunFolder(tmp_path / "run")

    def make(folder):
        shutil.rmtree(run.path)
        (folder / "state").write_text("")

    with run.at_work(config):
        run.begin(config, "a model", None, {})
        with pytest.raises(UserError, match="was deleted or replaced"):
            run.run_stage("extract", lambda _: None, make)
    assert not run.path.exists()


def test_what_a_killed_process_had_begun_to_write_is_removed(finished, tmp_path):
    made = finished.copied_to(tmp_path / "run")
    places = [".config.json.x.partial", "1_calibrate/.state.json.x.partial"]
    theirs = made.folder / "6_evaluate/.bench.json.x.partial"  # another process may be at it
    for path in (*(made.folder / place for place in places), theirs):
        path.write_text("{")
    with RunFolder(made.folder).at_work(config_of(made)):
        assert list(made.folder.rglob(".*.partial")) == [theirs]


def test_a_finished_run_needs_neither_its_data_nor_its_model_in_memory(
    finished, command, tmp_path, monkeypatch
):
    made = finished.copied_to(tmp_path / "run")
    shutil.rmtree(made.folder / "0_data")
    monkeypatch.setattr("dotmoe.pipeline.convert.load_dense", None)
    assert command(*made.command()).status == 0
    assert not (made.folder / "0_data").exists()


def test_the_manifest_says_what_each_stage_left(finished):
    folder = RunFolder(finished.folder)
    files = {name: set(stage["files"]) for name, stage in folder.manifest["stages"].items()}
    assert list(files) == ["data", "calibrate", "align", "extract", "export", "evaluate"]
    assert files["align"] == {"metrics.jsonl", "state.safetensors"}
    assert files["export"] == set()
    assert folder.seconds("align", "extract") > 0
    assert folder.seconds("finetune") is None


class Stopping(Progress):
    """Interrupted, as by Ctrl-C, when a bar has come so far; `before` is called first."""

    def __init__(self, title, done, before=lambda: None):
        super().__init__(quiet=True)
        self.title, self.done, self.before = title, done, before

    @contextmanager
    def bar(self, title, tokens=0):
        def update(now, total=0, note=""):
            if title == self.title and now >= self.done:
                self.before()
                raise KeyboardInterrupt

        yield update


def test_what_finished_nothing_leaves_nothing_but_a_users_files(finished, tmp_path):
    out = tmp_path / "run"
    config = config_of(finished, out=str(out))
    with pytest.raises(KeyboardInterrupt):
        convert(config, Stopping("tokenise", 0))
    assert not out.exists()
    with pytest.raises(KeyboardInterrupt):
        convert(config, Stopping("tokenise", 0, lambda: (out / "notes.txt").write_text("mine")))
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    with pytest.raises(UserError, match="in the way"):
        convert(config)


def test_an_export_that_was_edited_before_it_is_measured_is_refused(finished, command, tmp_path):
    """Else the perplexity of one k would stand beside the parameters of another."""
    made = finished.copied_to(tmp_path / "run")
    (made.folder / "6_evaluate/results.json").unlink()
    edited = made.folder / "5_export/config.json"
    k = read_json(edited)["num_experts_per_tok"]
    put_into(edited, num_experts_per_tok=k + 1)
    said = command(*made.command()).refusal()
    assert f"{edited} is {k + 1}, but the export was written and measured with {k}. Set" in said
    put_into(edited, num_experts_per_tok=k)
    assert command(*made.command()).status == 0


def test_a_run_of_a_version_with_one_fingerprint_of_all_text_goes_on(finished, command, tmp_path):
    """What it was cannot be told any more; nothing that is made is made again."""
    made = finished.copied_to(tmp_path / "run")
    inputs = read_json(made.folder / "manifest.json")["inputs"]
    put_into(made.folder / "manifest.json", inputs={"model": inputs["model"], "text": "0" * 64})
    (made.folder / "6_evaluate/results.json").unlink()
    done = command(*made.command())
    assert done.status == 0, done.err
    assert "calibrate (data)" not in done.err
    assert made.tensors() == finished.tensors()
    assert set(read_json(made.folder / "manifest.json")["inputs"]) == {"model", "text"}
    assert command("finetune", made.folder, tmp_path / "tuned", **TINY_FINETUNE).status == 0


def test_text_that_is_gone_is_missed_if_it_is_read_again(finished, command, tmp_path, monkeypatch):
    """A folder whose name a data set of the hub might have, too."""
    monkeypatch.chdir(tmp_path)
    text = Path("mine/texts/mine.txt")
    text.parent.mkdir(parents=True)
    text.write_text(Path(finished.options["data"]).read_text())
    made = finished.at(tmp_path / "run", data="mine/texts").made()
    shutil.move("mine", "gone")
    tuned = command("finetune", made.folder, tmp_path / "tuned", **TINY_FINETUNE)
    assert f"the text of {made.folder} cannot be read again from {tmp_path}" in tuned.refusal()
    shutil.rmtree(made.folder / "0_data")
    stages = read_json(made.folder / "manifest.json")["stages"]
    put_into(made.folder / "manifest.json", stages={"answers": stages.popitem()[1]})
    assert "is not there any more. Put it there again" in command(*made.command()).refusal()


def test_a_stage_that_leaves_nothing_is_finished_all_the_same(finished, tmp_path):
    folder = RunFolder(tmp_path / "run")
    with folder.at_work(config_of(finished, out=str(folder.path))):
        folder.begin(config_of(finished), "model", None, {})
        folder.run_stage("answers", lambda place: "found", lambda place: "made")
        (folder.path_of("answers")).rmdir()  # as tools that copy folders do
        folder.run_stage("data", lambda place: None, lambda place: (place / "a").touch())
        assert folder.run_stage("answers", lambda place: "found", lambda place: "made") == "found"
        assert folder.has("answers", "data")


def test_a_stage_takes_the_time_of_its_stopped_attempts_too(finished, tmp_path, monkeypatch):
    each = {"seconds": 1.5, "cpu_seconds": 2.25}
    monkeypatch.setattr("dotmoe.run.folder.Stopwatch.read", lambda stopwatch: each)
    folder = RunFolder(tmp_path / "run")

    def stopped(place):
        raise KeyboardInterrupt

    with folder.at_work(config_of(finished, out=str(folder.path))):
        folder.begin(config_of(finished), "model", None, {})
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                folder.run_stage("data", lambda place: None, stopped)
        assert folder.manifest["stopped"] == {"data": {"seconds": 3.0, "cpu_seconds": 4.5}}
        folder.begin(config_of(finished), "model", None, {})  # as a resumed run does
        folder.run_stage("data", lambda place: None, lambda place: None)
    manifest = read_json(folder.path / "manifest.json")
    stage = manifest["stages"]["data"]
    assert (stage["seconds"], stage["cpu_seconds"]) == (4.5, 6.75)
    assert not manifest["stopped"]
    assert folder.seconds("data") == 4.5


def test_a_stopwatch_counts_what_the_cpu_did():
    stopwatch, before = Stopwatch(), time.process_time()
    while time.process_time() < before + 0.05:
        pass
    read = stopwatch.read()
    assert read["cpu_seconds"] >= 0.05 - 0.001, "rounded to milliseconds"
    assert read["seconds"] > 0
