"""The command line itself: help, version, failures of the machine. Oracle: the words."""

import errno
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from unittest.mock import MagicMock

import pytest
import torch

from dotmoe import finetune
from dotmoe.cli import COMMANDS, commands, run
from dotmoe.cli.arguments import config_of
from dotmoe.cli.entry import message_of
from dotmoe.cli.start import CONFIGS, command_options
from dotmoe.common.errors import UserError
from dotmoe.common.options import values_of
from dotmoe.export.architectures import FORMATS
from dotmoe.export.choice import formats_like
from dotmoe.export.llama_cpp import LlamaCppRuntime
from dotmoe.measure.config import BenchConfig
from dotmoe.measure.evaluate.harness import require_harness
from dotmoe.measure.inspection.accelerators import ACCELERATORS
from dotmoe.method.config import AlignConfig, RepairConfig
from dotmoe.rivals.baselines import METHODS
from dotmoe.rivals.baselines.contract import optimal_assignment
from dotmoe.rivals.config import BaselineConfig
from dotmoe.rivals.pruning import PRUNING
from dotmoe.run.config import finetune_recipe, recipe
from runs import refusal

WITH_LORA = ("RUN", "OUT", "--train", "lora")
HELP_COLUMNS, HINT = 100, "See dotmoe convert --help."


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_common_options_exist(name, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(HELP_COLUMNS))
    short, full = command(name, "--help"), command(name, "--help-all")
    assert short.status == full.status == 0
    assert COMMANDS[name].help in short.out
    for option in COMMANDS[name].common:
        assert f"  --{option}" in short.out
    if COMMANDS[name].common:
        assert "--help-all" in short.out
        assert len(short.out) < 0.6 * len(full.out)
    assert max(map(len, full.out.splitlines())) <= HELP_COLUMNS
    for above, below in pairwise(full.out.splitlines()):
        if above.startswith(" " * 8) and below.startswith(" " * 8) and below.strip():
            assert len(above.rstrip()) + len(below.split()[0]) >= HELP_COLUMNS, "a ragged line"


IN_ONE_PROCESS = {
    "quickstart": "--out OUT",
    "inspect": "embedded",
    "compare": "embedded OUT --data FILE",
    "export": "RUN OUT",
    "evaluate": "embedded --tasks piqa",
    "analyse": "RUN",
    "bench": "embedded RUN",
    "report": "RUN",
}
"""A line of each command that several processes of torchrun cannot share."""


@pytest.mark.parametrize("name", IN_ONE_PROCESS)
def test_torchrun_is_refused_by_what_runs_in_one_process(name, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = command(name, *IN_ONE_PROCESS[name].split()).refusal()
    assert f"dotmoe {name} runs in one process, but torchrun started several." in line
    assert not any(tmp_path.iterdir())


def test_every_command_shares_torchruns_work_or_is_refused():
    """That the first two do share it is tested in `tests/distributed` and `tests/finetune`."""
    assert {"convert", "finetune"} == COMMANDS.keys() - IN_ONE_PROCESS.keys()


def test_a_command_says_each_warning_once():
    code = (
        "import logging; from dotmoe.cli import commands, run\n"
        "commands.run_report = lambda _: [logging.getLogger('x').warning('%s', w) for w in 'aba']\n"
        "run(['report', 'RUN'])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # A CUDA build of torch may add a line about a machine that has a compiler and no GPU.
    warnings = [line for line in said.stderr.splitlines() if line.startswith("WARNING")]
    assert warnings == ["WARNING: a", "WARNING: b"]


def test_help_version_and_wrong_options_come_without_what_takes_seconds_to_import():
    code = (
        "import sys; from contextlib import suppress; from dotmoe.cli import COMMANDS, run\n"
        "assert run([]) == 0\n"
        "for line in ['--version'], ['--help'], *([name, option] for name in COMMANDS "
        "for option in ('--help', '--help-all', '--nosuch')):\n"
        "    with suppress(SystemExit): run(line)\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'pyarrow', 'numpy'} & {*sys.modules}))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.startswith("usage: dotmoe COMMAND")
    assert "\ndotmoe 0.1.0\nusage: dotmoe COMMAND" in said.stdout
    assert said.stderr.count("error") == len(COMMANDS)
    assert said.stdout.endswith("\n[]\n")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("GPU"), "--micro-batch-size or --seq-len, or set"),
        (OSError(errno.ENOSPC, "No space"), "the disk is full"),
        (PermissionError(errno.EACCES, "no"), "Get permission"),
        (RuntimeError("I/O error (os error 28)"), "the disk is full"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory"),
        (MemoryError(), "out of memory (MemoryError). Lower --micro"),
        (FileExistsError(errno.EEXIST, "File exists", "a.txt"), "a.txt: File exists. Choose"),
        (PermissionError(errno.EACCES, "no", "run/.lock"), "run: no. Get permission"),
        (
            OSError(errno.ENAMETOOLONG, "File name too long", "a" * 300),
            "a: File name too long",
        ),
        (KeyError("a defect"), None),
    ],
)
def test_failures_of_the_machine_are_one_line_and_defects_are_not(error, words):
    message = message_of(error, "finetune")
    assert message is None if words is None else words in message


def test_a_terminal_that_lacks_a_letter_shows_a_question_mark(monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    monkeypatch.setattr(commands, "run_report", lambda config: print("1 ± 2"))
    assert run(["report", "RUN"]) == 0
    sys.stdout.flush()
    assert shown.getvalue() == b"1 ? 2\n"


def test_a_result_is_written_before_a_reader_may_have_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(commands.bench, "bench", lambda config, update: {"points": []})
    monkeypatch.setattr("builtins.print", MagicMock(side_effect=BrokenPipeError))
    out = tmp_path / "bench.json"
    with pytest.raises(BrokenPipeError):
        commands.run_bench(BenchConfig(dense="a", moe="b", out=str(out), json=True))
    assert out.is_file()


def test_a_temperature_that_overflows_is_refused():
    words = ["MODEL", "--generate", "1", "--prompts", "a", "--temperature", "1e-39"]
    with pytest.raises(UserError, match=r"--temperature is 1e-39, which overflows.*0\.001"):
        config_of("evaluate", words)


def test_a_place_may_begin_with_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, words in (
        ("convert", ["MODEL", "~/run"]),
        ("finetune", ["~/run", "~/tuned"]),
        ("evaluate", ["MODEL", "--generate", "1", "--prompts", "a", "--out=~/results"]),
    ):
        config = config_of(name, words)
        assert config.out.startswith(str(tmp_path))


@pytest.mark.parametrize("name", ["convert", "compare", "finetune", "evaluate"])
def test_what_lowers_memory_are_options_of_the_command(name):
    options = {each.typed for each in command_options(name)}
    named = re.findall(r"--[a-z-]+[a-z]", message_of(MemoryError(), name))
    assert named
    assert set(named) <= options


def test_a_reader_that_has_read_enough_is_no_failure_and_no_extra_is_needed():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('lm_eval', 'gguf', 'sklearn', 'ot'))); "
        "import dotmoe.export.choice; from dotmoe.cli import commands, run; "
        "commands.run_bench = lambda *_: commands._show('a table'); "
        "sys.exit(run(['bench', 'DENSE', 'MOE']))"
    )
    reader, writer = os.pipe()
    os.close(reader)
    assert subprocess.run([sys.executable, "-c", code], stdout=writer).returncode == 0
    os.close(writer)


@pytest.mark.parametrize(
    ("package", "extra", "needs"),
    [
        ("gguf", "gguf", lambda: formats_like("gguf_llama")),
        ("llama_cpp", "llama-cpp", lambda: LlamaCppRuntime("model.gguf", 1)),
        ("lm_eval", "eval", require_harness),
        ("ot", "baselines", lambda: optimal_assignment(torch.ones(4, 2))),
        ("peft", "lora", lambda: finetune(config_of("finetune", WITH_LORA))),
    ],
)
def test_a_missing_package_is_named_by_its_extra(package, extra, needs, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    assert f"pip install -e '.[{extra}]'" in refusal(needs)


def test_an_option_that_does_not_exist_is_told_in_any_locale(command, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    line = command("convert", "model", "out", stps=3).refusal()
    assert line.endswith("--stps is no option of dotmoe convert. Did you mean --steps? " + HINT)


NAMED = {
    "convert --recipe llama2_7b OUT": ("meta-llama/Llama-2-7b-hf", "OUT"),
    "convert --recipe llama2_7b --steps 3 OUT": ("meta-llama/Llama-2-7b-hf", "OUT"),
    "convert --recipe llama2_7b MODEL OUT": ("MODEL", "OUT"),
    "compare --recipe llama2_7b OUT --methods cmoe": ("meta-llama/Llama-2-7b-hf", "OUT"),
    "convert --config FILE": ("old-model", "old-out"),
    "convert --config FILE OUT": ("old-model", "OUT"),
    "convert --config FILE --data a.txt": ("old-model", "old-out"),
    "convert OUT --config FILE --data a.txt": ("old-model", "OUT"),
    "convert --config FILE --steps 3 OUT": ("old-model", "OUT"),
    "convert --config FILE MODEL OUT": ("MODEL", "OUT"),
    "convert --recipe llama2_7b": "Missing from dotmoe convert: OUT",
    "convert --recipe paper OUT": "Missing from dotmoe convert: OUT",
    "convert --recipe llama2_7b OUT --stpes 3": "Did you mean --steps?",
    "convert MODEL OUT --config nofile.json": r"nofile.json cannot be read .* Name the config.json",
}


@pytest.mark.parametrize("line", NAMED)
def test_what_a_recipe_or_config_names_may_be_left_out(line, tmp_path):
    name, *words = line.replace("FILE", str(tmp_path / "config.json")).split()
    config = {"command": "convert", "model": "old-model", "out": "old-out"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if isinstance(NAMED[line], str):
        with pytest.raises(UserError, match=NAMED[line]):
            config_of(name, words)
    else:
        found = config_of(name, words)
        assert (found.model, found.out) == NAMED[line]


IN_A_FILE = {
    "convert": {
        ("lte_steps", "baseline", 7, ""): "is 7, but it is for --method lte alone.",
        ("lte_steps", "baseline", 7, "--method lte"): None,
        ("lr", "align", 0.5, ""): "is an option of the alignment, which is off.",
        ("lr", "align", 0.01, ""): "is an option of the alignment",  # a value of another recipe
        ("lr", "align", 0.5, "--steps 3"): None,
        ("time", None, "1h", ""): "is 1h, but a repair is chosen by --time alone. Give --time 1h",
        ("time", None, "1h", "--time 2h"): None,
        ("repair_tokens", "repairing", 4096, "--no-repair"): None,  # it has an effect in the file
    },
    "inspect": {
        ("tau_end", "assignment", 0.5, ""): "is 0.5, but it is for --steps or --start random"
    },
    "compare": {
        ("lte_steps", "baseline", 7, "--methods cmoe"): "is 7, but it is for lte among --methods",
        ("lte_steps", "baseline", 7, "--methods lte"): None,
    },
    "finetune": {("lora_rank", "finetune", 3, ""): "is 3, but it is for --train lora alone."},
}


@pytest.mark.parametrize("beside_a_run", [False, True])
@pytest.mark.parametrize("name", IN_A_FILE)
def test_a_config_file_is_refused_for_an_option_without_effect(name, beside_a_run, tmp_path):
    file = tmp_path / "config.json"
    start = recipe(model="M", out="OUT")
    if name == "finetune":
        start = finetune_recipe(run="RUN", out="OUT")
    for (option, group, value, line), wrong in IN_A_FILE[name].items():
        values = values_of(start)
        if beside_a_run:
            (tmp_path / "manifest.json").write_text(json.dumps({"config": values}))
        (values[group] if group else values)[option] = value
        file.write_text(json.dumps(values))
        words = ["--config", str(file), *line.split()]
        if wrong is None:
            assert config_of(name, words)
        else:
            said = refusal(config_of, name, words)
            assert said.startswith(f"{option} in {file} {wrong}")
            assert f"or leave {option} in {file} out." in said


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("--recipe qwen25_7b OUT", (128, None, None, 37, None)),
        ("--recipe qwen25_7b OUT --active 0.5", (128, None, 0.5, None, None)),
        ("--recipe qwen25_7b OUT --experts 8 --active-experts 2", (None, 8, None, 2, None)),
        ("M OUT --active 0.5", (None, None, 0.5, None, None)),
    ],
)
def test_an_option_takes_the_place_of_what_a_recipe_says_otherwise(line, found):
    """By the command line and in Python."""
    experts = config_of("convert", line.split()).experts
    names = ("expert_size", "experts", "active", "active_experts", "keep")
    assert tuple(getattr(experts, name) for name in names) == found
    assert recipe("qwen25_7b", active=0.5).experts.active_experts is None
    both = ["M", "OUT", "--active", "0.5", "--active-experts", "3"]
    assert "each determines the other" in refusal(config_of, "convert", both)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("compare M OUT --time 2h", "--time is no option of dotmoe compare. It is one of"),
        ("finetune RUN OUT --eval-tokens 512", "--eval-tokens is 512, but it is for --eval-text"),
    ],
)
def test_an_option_that_could_not_do_what_it_says_is_refused(line, said):
    command, *words = line.split()
    assert said in refusal(config_of, command, words)


def test_what_nobody_gave_in_a_run_follows_what_is_given_anew(tmp_path):
    """What somebody gave stays; a plain repeat has the values of the run, and can be repeated."""
    file, followed = tmp_path / "config.json", ("first_dense_layers", "shared")
    start = recipe(model="M", out="OUT", active=0.75, shared=0.375, first_dense_layers=1)
    start = replace(start, followed=followed)
    manifest = {"config": values_of(start)}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))

    def experts(*line, followed=followed, **edited):
        values = values_of(replace(start, followed=followed))
        values["experts"] |= edited
        file.write_text(json.dumps(values))
        found = config_of("convert", ["--config", str(file), *line])
        return found.experts.active, found.experts.shared, found.experts.first_dense_layers

    assert experts() == (0.75, 0.375, 1)
    assert experts("--active", "0.5") == (0.5, None, None)
    assert experts("--active", "0.5", "--shared", "0.1") == (0.5, 0.1, None)
    assert experts("OTHER", "OUT") == (0.75, None, None)
    assert experts("M", "OUT2") == (0.75, 0.375, 1)
    assert experts("--active", "0.5", followed=("shared",)) == (0.5, None, 1)
    assert experts("--active", "0.5", followed=()) == (0.5, 0.375, 1)
    assert experts("--active", "0.5", shared=0.25) == (0.5, 0.25, None)


def test_a_repeat_of_a_run_says_what_nobody_gave(tmp_path):
    """A repeat of the repeat with another share has the other values of that share, too."""
    start = recipe(model="M", out="OUT", active=0.75, shared=0.375, first_dense_layers=1)
    start = replace(start, followed=("first_dense_layers", "shared"))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(values_of(start)))
    (tmp_path / "manifest.json").write_text(json.dumps({"config": values_of(start)}))
    words = ["--config", str(file)]
    assert config_of("convert", words).followed == ("first_dense_layers", "shared")
    assert config_of("convert", [*words, "--shared", "0.1"]).followed == ()
    assert config_of("convert", [*words, "--eval-tokens", "512"]).followed == start.followed
    assert config_of("convert", [*words, "--active", "0.5"]).followed == ()


def test_the_file_of_a_run_is_taken_whatever_its_command_line_switched_off(tmp_path):
    """`--config` repeats a run, and so do options that had an effect before others were given."""
    start = recipe(model="M", out="OUT", repair_tokens=4096)
    values = values_of(replace(start, repair=False))
    (tmp_path / "config.json").write_text(json.dumps(values))
    words = ["--config", str(tmp_path / "config.json")]
    assert "repair_tokens" in refusal(config_of, "convert", words)
    (tmp_path / "manifest.json").write_text(json.dumps({"config": values}))
    assert config_of("convert", words) == replace(start, repair=False)


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("compare embedded x --methods nosuch", ["dot_moe", *METHODS, *PRUNING, "all"]),
        ("convert embedded x --method nosuch", ["dot_moe", *METHODS]),
        ("inspect embedded --gpu nosuch", ["None", *ACCELERATORS]),
    ],
)
def test_choices_are_what_there_is_in_the_order_of_the_table(line, names, command):
    said = command(*line.split()).refusal()
    assert re.findall(r"[\w-]+", said.partition("Expected one of")[2].partition(".")[0]) == names


def test_help_says_where_each_format_runs_and_which_take_another_k(command):
    said = " ".join(command("export", "--help").out.split())
    for name, form in FORMATS.items():
        assert f"{name}: runs in {', '.join(form.servers)}." in said
    sentence = said.partition("Finished files take another k when they are loaded only")[2]
    named = re.findall(r" as (\w+)", sentence.partition(".")[0])
    assert named == [name for name, form in FORMATS.items() if form.active_experts_editable]


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("name", COMMANDS)
def test_help_fills_the_terminal_and_breaks_at_words_alone(name, columns, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    unbroken = command(name, "--help-all").out.split()
    monkeypatch.setenv("COLUMNS", str(columns))
    short, full = command(name, "--help").out, command(name, "--help-all").out
    assert full.split() == unbroken
    assert max(map(len, full.splitlines())) <= columns
    if COMMANDS[name].common:
        starts = [line for line in short.splitlines() if line.startswith("  --")]
        assert {*starts} - {line for line in starts if "--help-all" in line} <= {*full.splitlines()}
    assert not re.search(r"\{None\}|STR\b|FLOAT\b|INT\b", full)


def test_help_is_a_command_too(command):
    assert command("help").out == command("--help").out
    assert command("help", "bench").out == command("bench", "--help").out
    assert "unknown command foo" in command("help", "foo").refusal()
    assert "unknown command convrt" in command("convrt").refusal()


def test_every_option_of_a_table_of_needs_exists_and_help_tells_what_it_needs(command):
    for name in COMMANDS:
        text = " ".join(command(name, "--help-all").out.split())
        options = {option.name for option in command_options(name)}
        for need in getattr(CONFIGS[name], "needs", ()):
            assert {*need.options} <= options
            assert text.count(f"Only with {need.needs}.") >= len(need.options)


WITHOUT_EFFECT = [
    "convert M OUT --method random_split --steps 100",
    "convert M OUT --router-steps 3",
    "convert M OUT --split-router ridge",
    "convert M OUT --method static_pruning --router-steps 3",
    "convert M OUT --lte-steps 100",
    "convert M OUT --method cmoe --lte-steps 7",
    "convert M OUT --no-repair --repair-epochs 2",
    "convert M OUT --no-repair --repair-tokens 100",
    "convert M OUT --start random --calibration-tokens 9",
    "convert M OUT --start random --ridge 0.1",
    "convert M OUT --method cmoe --start random",
    "convert M OUT --method cmoe --solver sinkhorn",
    "convert M OUT --tau-end 0.2",
    "convert M OUT --targets attention --active 0.25",
    "convert M OUT --checkpoint-every 9",
    "convert M OUT --data a.txt --heldout-answers 0 --data-seed 1",
    "inspect M --targets both --finetune-steps 9",
    "inspect M --lr 0.1",
    "compare M OUT --methods cmoe --lte-steps 9",
    "compare M OUT --methods cmoe --mask-steps 9",
    "compare M OUT --methods cmoe --start random",
    "compare M OUT --steps 9",
    "compare M OUT --lr 0.1",
    "compare M OUT --finetune-recipe sft",
    "compare M OUT --seeds 1 2 --seed 3",
    "finetune RUN OUT --lora-rank 8",
    "finetune RUN OUT --data a.txt --heldout-answers 0 --data-seed 1",
    "evaluate M --text a.txt --tokenizer other",
    "evaluate M --generate 3 --prompts a --window 64",
    "evaluate M --generate 3 --prompts a --protocol gptq",
    "evaluate M --generate 3 --prompts a --max-tokens 64",
    "evaluate M --generate 3 --prompts a --batch-size 2",
    "evaluate M --text a.txt --temperature 1",
    "evaluate M --text a.txt --shots 1",
    "bench A.gguf B.gguf --dtype float32",
    "bench A B --batch-sizes --decode-steps 3",
    "export RUN OUT --format mixtral --gguf-type f16",
]


@pytest.mark.parametrize("line", WITHOUT_EFFECT)
def test_an_option_without_effect_is_refused(line):
    name, *words = line.split()
    option = [word for word in words if word.startswith("--")][-1]
    with pytest.raises(UserError, match=f"^{option} .* or leave {option} out\\.$"):
        config_of(name, words)


@pytest.mark.parametrize(
    "line",
    [
        "convert M OUT --method random_split --router-steps 3 --lr 0.1",
        "convert M OUT --steps 3 --lr 0.1 --solver sinkhorn --checkpoint-every 2",
        "convert M OUT --recipe paper --method cmoe",
        "convert M OUT --recipe paper --lr 0.1 --tau-end 0.2",
        "convert M OUT --start random --solver sinkhorn",
        "convert M OUT --method cmoe --ridge 0.1",
        "convert M OUT --method lte --lte-steps 3",
        "convert M OUT --data dolmino --data-seed 1",
        "convert M OUT --data a.txt --data-seed 1",
        "convert M OUT --data self --heldout-answers 0 --data-seed 1",
        "compare M OUT --methods all --lte-steps 9 --mask-steps 9 --start random",
        "finetune RUN OUT --train lora --lora-rank 8",
        "evaluate M.gguf --text a.txt --tokenizer other",
        "evaluate M --text a.txt --generate 3 --prompts a --window 64",
        "bench A B.gguf --dtype float32",
        "convert --data a.txt MODEL OUT",
        "convert --data a.txt b.txt -- MODEL OUT",
    ],
)
def test_an_option_with_an_effect_is_taken(line):
    name, *words = line.split()
    assert config_of(name, words)


def test_python_refuses_options_without_effect_as_the_command_line_does():
    refused = {
        "--lte-steps": {"baseline": BaselineConfig(lte_steps=7)},
        "--repair-epochs": {"repair": False, "repairing": RepairConfig(repair_epochs=1)},
        "--steps": {"method": "cmoe", "align": AlignConfig(steps=7)},
    }
    for option, changes in refused.items():
        assert refusal(lambda changes=changes: recipe(**changes)).startswith(option)
    assert recipe("paper", method="cmoe").calibrate.start == "random"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("convert M OUT --format glm", "glm4_moe"),
        ("convert M OUT --format gguf", "dotmoe export RUN"),
        ("convert M OUT --active 2", r"--active is 2\.0, but it must be at most 1\.$"),
        ("convert M OUT --expert_size x", "--expert-size is 'x', but it must be a whole number"),
        ("convert M OUT --steps", "--steps has no value"),
        ("convert M OUT --no-repair=1", "takes no value"),
        ("inspect M A B", "B is one word too many"),
        ("convert M OUT --active 0.5 --active 0.75", r"--active is given twice. Give it once\."),
        ("convert M OUT --data a --seed 1 --data=b", "--data .* twice. .* with all its values"),
        ("convert M OUT --no-repair --repair", "--repair is given twice"),
        ("convert M OUT --seq-len 8 --seq_len 9", "--seq-len is given twice"),
    ],
)
def test_a_wrong_word_is_refused_before_any_model_or_text_is_read(line, words, command):
    assert re.search(words, command(*line.split()).refusal())


def test_a_device_that_is_not_there_says_what_is(command, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = command("inspect", "embedded", "--device", "cuda:63").refusal()
    assert "No GPU with CUDA is found here. Choose cpu" in said
