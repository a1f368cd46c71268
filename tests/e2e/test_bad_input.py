"""Bad input at the command line: one line that says what to do, and nothing left behind."""

import fcntl
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dotmoe.cli import run

OPTIONS = {
    "--expert-size": "8",
    "--steps": "2",
    "--batch-size": "2",
    "--seq-len": "32",
    "--calibration-tokens": "256",
    "--eval-tokens": "512",
    "--scale-tokens": "128",
    "--verify-tokens": "64",
}


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    lines = [f"Line {i}: the {['cat', 'dog', 'crow'][i % 3]} ate figs." for i in range(400)]
    path.write_text("\n".join(lines))
    return path


def command(model, out, text, *extra):
    small = [word for option in OPTIONS.items() for word in option]
    return ["convert", str(model), str(out), "--data", str(text), *small, *map(str, extra)]


def files(folder):
    return set(folder.rglob("*"))


def the_one_line(arguments, capfd):
    """Run what must be refused; its last line on standard error."""
    capfd.readouterr()
    assert run(arguments) == 2
    error = capfd.readouterr().err
    assert "Traceback" not in error
    lines = [line for line in error.splitlines() if not re.match(r"\w+( \(\w+\))?: \d+ of", line)]
    assert len(lines) == 1, error
    assert lines[0].startswith("dotmoe: error: ")
    return lines[0]


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ("--active-experts 13", r"13.*12"),
        ("--active-experts 0", r"0.*1 to 12"),
        ("--active 1.5", r"1\.5.*at most 1"),
        ("--expert-size 7", r"7.*96.*6 or 8"),
        ("--expert-size 6", r"6.*multiples of 4"),
        ("--experts 6", r"8.*6.*96"),
        ("--recipe papr", "Did you mean paper"),
        ("--recipe paper --config x", "one of them"),
        ("--recipe", "expected one argument"),
        ("--stpes 3", "Did you mean --steps"),
        ("--active-expert 3", "Did you mean --active-experts"),
        ("--dtype flot32", "Did you mean float32"),
        ("--steps many", "many"),
        ("--device bogus", "'bogus'.*cuda:N"),
        ("--device meta", "'meta'.*cuda:N"),
        ("--eval-text {tmp}/nowhere.txt", "nowhere.txt does not exist"),
        ("--data {tmp}/nowhere.txt", "nowhere.txt does not exist"),
        ("--data", "names no source"),
        ("--config {tmp}/nowhere.json", "nowhere.json cannot be read"),
        ("--steps -1", "steps is -1"),
        ("--batch-size 0", "batch_size is 0.*at least 1"),
        ("--seq-len 1", "seq_len is 1.*at least 2"),
        ("--calibration-tokens 0", "calibration_tokens is 0"),
        ("--eval-tokens 0", "eval_tokens is 0"),
        ("--scale-tokens 0", "scale_tokens is 0"),
        ("--verify-tokens -1", "verify_tokens is -1"),
        ("--lr 0", r"lr is 0\.0.*above 0"),
        ("--lr nan", "lr is nan"),
        ("--lr-router -1", r"lr_router is -1\.0"),
        ("--kl-weight -1", "kl_weight is -1"),
        ("--kl-weight 0 --ce-weight 0", "nothing to learn"),
        ("--weight-decay -1", "weight_decay is -1"),
        ("--max-epochs inf", "max_epochs is inf"),
        ("--ridge 0", "ridge is 0"),
        ("--tau-end 0", "above 0"),
        ("--tau-start nan", "tau_start is nan"),
        ("--max-shard-gib 0", "max_shard_gib is 0"),
        ("--surrogate-temperature 0", "surrogate_temperature is 0"),
        ("--format glm", "glm.*glm4_moe"),
    ],
)
def test_a_bad_option_gets_one_line_and_leaves_nothing(
    options, pattern, tiny_dense, text, tmp_path, capfd
):
    before = files(tmp_path)
    extra = options.format(tmp=tmp_path).split()
    line = the_one_line(command(tiny_dense("llama"), tmp_path / "run", text, *extra), capfd)
    assert re.search(pattern, line), line
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        (b"", "text.txt is empty"),
        (bytes(range(256)) * 20, "text.txt is not UTF-8"),
        (b"short", "text.txt has .*seq_len"),
    ],
)
def test_a_bad_text_is_named(content, pattern, tiny_dense, text, tmp_path, capfd):
    text.write_bytes(content)
    line = the_one_line(command(tiny_dense("llama"), tmp_path / "run", text), capfd)
    assert re.search(pattern, line), line
    assert files(tmp_path) == {text}


def test_a_short_evaluation_text_is_named_before_anything_is_trained(
    tiny_dense, text, tmp_path, capfd
):
    short = tmp_path / "short.txt"
    short.write_text("too little")
    arguments = command(tiny_dense("llama"), tmp_path / "run", text, "--eval-text", short)
    assert "short.txt has 11 tokens" in the_one_line(arguments, capfd)
    assert not (tmp_path / "run").exists()


def break_config(**changes):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def spoil_weight(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def drop_weight(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def drop_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


BROKEN_MODELS = {
    "gpt2": (break_config(model_type="gpt2"), "gpt2.*llama, mistral"),
    "relu": (break_config(hidden_act="relu"), "relu.*SwiGLU"),
    "mlp_bias": (break_config(mlp_bias=True), "mlp_bias.*without"),
    "nan": (spoil_weight, r"layers\.1\.mlp\.up_proj.*NaN"),
    "lost": (drop_weight, r"layers\.1\.mlp\.up_proj.*random"),
    "truncated": (truncate, "no whole safetensors"),
    "tokenizer": (drop_tokenizer, r"no tokenizer\.json"),
}


@pytest.mark.parametrize("name", BROKEN_MODELS)
def test_a_broken_model_is_named_and_leaves_nothing(name, tiny_dense, text, tmp_path, capfd):
    change, pattern = BROKEN_MODELS[name]
    model = shutil.copytree(tiny_dense("llama"), tmp_path / "model")
    change(model)
    line = the_one_line(command(model, tmp_path / "run", text), capfd)
    assert re.search(pattern, line), line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["lost", "truncated", "tokenizer"])
def test_evaluate_refuses_a_broken_model(name, tiny_dense, text, tmp_path, capfd):
    change, pattern = BROKEN_MODELS[name]
    model = shutil.copytree(tiny_dense("llama"), tmp_path / "model")
    change(model)
    assert re.search(pattern, the_one_line(["evaluate", str(model), "--text", str(text)], capfd))


def test_evaluate_refuses_a_folder_without_a_model(text, tmp_path, capfd):
    assert "config.json" in the_one_line(["evaluate", str(tmp_path), "--text", str(text)], capfd)


def test_a_float16_checkpoint_is_told_the_option_that_helps(tiny_dense, text, tmp_path, capfd):
    model = tiny_dense("llama", dtype="float16")
    assert "--export-dtype" in the_one_line(command(model, tmp_path / "run", text), capfd)


@pytest.mark.parametrize("out", ["text.txt", "text.txt/run", "full"])
def test_an_output_in_the_way_is_left_as_it_was(out, tiny_dense, text, tmp_path, capfd):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    before = files(tmp_path)
    line = the_one_line(command(tiny_dense("llama"), tmp_path / out, text), capfd)
    assert re.search("in the way|cannot be made", line), line
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        ("{", "not JSON"),
        ("[]", "JSON object"),
        ('{"eval_token": 3}', "eval_token .*Did you mean eval_tokens"),
        ('{"align": 3}', "align .*JSON object"),
        ('{"align": {"lr": "big"}}', "lr .*'big'.*float"),
        ("{}", "lacks model"),
    ],
)
def test_a_bad_config_file_is_refused(content, pattern, tmp_path, capfd):
    path = tmp_path / "config.json"
    path.write_text(content)
    line = the_one_line(["convert", "--config", str(path)], capfd)
    assert re.search(pattern, line), line


def test_a_second_process_in_the_folder_is_refused_and_harms_nothing(
    tiny_dense, text, tmp_path, capfd
):
    arguments = command(tiny_dense("llama"), tmp_path / "run", text)
    assert run(arguments) == 0
    before = files(tmp_path)
    with (tmp_path / "run" / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "another dotmoe process" in the_one_line(arguments, capfd)
    assert files(tmp_path) == before
    assert run(arguments) == 0


def test_a_model_that_changed_since_is_refused(tiny_dense, text, tmp_path, capfd):
    model = shutil.copytree(tiny_dense("llama"), tmp_path / "model")
    arguments = command(model, tmp_path / "run", text)
    assert run(arguments) == 0
    weights = load_file(model / "model.safetensors")
    save_file({n: 2 * w for n, w in weights.items()}, model / "model.safetensors")
    assert "files have changed" in the_one_line(arguments, capfd)
