"""The README is current, its links lead somewhere, and its commands are commands."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from dotmoe.cli import COMMANDS
from dotmoe.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def updater():
    spec = importlib.util.spec_from_file_location(
        "update", ROOT / "scripts" / "update_documents.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_generated_parts_are_current():
    for document in updater().DOCUMENTS:
        assert updater().rendered(document.read_text()) == document.read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), target


def test_commands_and_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    for block in (text for language, text in fences if not language):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["dotmoe"]:
                assert words[1] in COMMANDS
            if words[:1] == ["make"]:
                assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE)
    for name in re.findall(r"--recipe (\w+)", README):
        assert any(name in recipes for recipes in RECIPES.values())


def test_options_named_in_the_readme_are_options():
    others = {"recipe", "config", "help", "nproc-per-node"}  # the last is torchrun's
    source = "".join(p.read_text() for p in (ROOT / "src" / "dotmoe").rglob("*.py"))
    for option in set(re.findall(r"--([a-z][a-z-]+)", README)) - others:
        assert re.search(rf"^    {option.replace('-', '_')}:", source, re.MULTILINE), option
