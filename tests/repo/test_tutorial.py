"""The script that records the tutorial. Oracle: the page, read by eye into this file."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("record", ROOT / "scripts/record_tutorial.py")
record = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(record)
PAGE = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")


def test_every_step_is_a_command_of_the_page():
    found = record.commands(PAGE)
    assert [*found] == ["install", "model", "inspect", "convert", "ask", "report"]
    assert found["convert"].endswith("--eval-tokens 2048 --heldout-answers 8"), "lines are joined"
    assert found["ask"].endswith('"What is the capital of France?" "Name three fruits."')


def test_a_page_without_a_step_is_refused():
    with pytest.raises(SystemExit, match="has 0 commands that begin 'dotmoe report'"):
        record.commands(PAGE.replace("dotmoe report first-run", "dotmoe analyse first-run"))


def test_only_what_the_page_shows_of_an_output_is_kept():
    output = "progress\n model  llama\n parameters \n\ndotmoe convert on this CPU\n"
    (inspect,) = (step for step in record.STEPS if step.name == "inspect")
    assert record.shown(inspect, output) == " model  llama\n parameters"
    (install,) = (step for step in record.STEPS if step.name == "install")
    assert record.shown(install, output) is None


def test_a_recorded_output_is_of_the_command_that_the_page_prints():
    steps = json.loads((ROOT / "results/tutorial.json").read_text(encoding="utf-8"))["steps"]
    assert {name: step["command"] for name, step in steps.items()} == record.commands(PAGE)
