"""Commands and their options with defaults, as `--help` shows them; public names and recipes.

The list in `golden/options.json` is part of what users rely on: a line that goes from it goes into
CHANGELOG.md.
"""

import contextlib
import re

import dotmoe
from dotmoe.cli import run

NAMES = {"DataConfig", "ExpertLayout", "FinetuneConfig", "LoadConfig", "RunConfig"} | {
    *("Conversion", "TrainingConfig", "UserError", "convert", "recipe")
}


def helped(command, monkeypatch, capsys):
    """What `--help` says, without colours and frames."""
    monkeypatch.setenv("COLUMNS", "100")
    with contextlib.suppress(SystemExit):
        assert run([*command, "--help-all" if command else "--help"]) == 0
    return re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", "", capsys.readouterr().out)


def options_in(text):
    """Options of a help text and their defaults."""
    found, name = {}, None
    for line in text.splitlines():
        words = line.strip()
        if re.match(r" {1,2}--[a-z]", line):
            name = words.split()[0].rstrip(",")
            found[name] = words
        elif not words:
            name = None
        elif name:
            found[name] += " " + words
    defaults = {name: re.findall(r"\(default: ([^()]*)\)", said) for name, said in found.items()}
    return {name: said[-1] if said else None for name, said in defaults.items()}


def test_commands_and_options_with_their_defaults(golden, monkeypatch, capsys):
    overview = helped([], monkeypatch, capsys)
    commands = re.findall(r"^  (\w+) ", overview, re.MULTILINE)
    found = {name: options_in(helped([name], monkeypatch, capsys)) for name in commands}
    assert [name for name in commands if not found[name]] == ["report"]
    assert found == golden("options", found)


def test_recipes_are_named_by_the_help(monkeypatch, capsys):
    text = " ".join(helped(["convert"], monkeypatch, capsys).split())
    recipes = "default, paper, llama2_7b, llama3_8b, qwen25_7b, qwen25_7b_half_active, "
    assert f"{recipes}qwen25_7b_attention, small, quickstart" in text
    assert "sft, small" in " ".join(helped(["finetune"], monkeypatch, capsys).split())


def test_public_names_can_be_imported():
    assert set(dotmoe.__all__) >= NAMES
    assert all(hasattr(dotmoe, name) for name in dotmoe.__all__)
    assert callable(dotmoe.convert)
    assert callable(dotmoe.finetune)
    assert dotmoe.__version__ == "0.1.0"
