"""The rules of the house, read off the source: imports point down, rooms are small."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "dotmoe"

LAYERS = [
    {"errors"},
    {"files", "options", "progress", "tables", "worker", "granularity"},
    {"transport", "layout", "models", "stdlib_text", "distributed"}
    | {"checksums", "sealed_json", "provenance"},
    {"training", "llama_cpp", "run_folder"},
    {"data", "parameters"},
    {"checkpoint"},
    {"moe", "sharded_weights"},
    {"load", "calibrate", "align", "extract", "export", "report", "inspection"} | {"self_text"},
    {"baselines", "finetuning"},
    {"config", "tokenise", "evaluate"},
    {"recipes", "finished_run"},
    {"pipeline", "reexport", "bench"},
    {"quickstart", "compare", "analyse"},
    {"sweep"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FILES = sorted(PACKAGE.rglob("*.py"))
LONGEST_FILE = 700
MOST_STATEMENTS = 40


def room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(tree):
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "dotmoe" and len(parts) > 1:
                yield parts[1], node.lineno


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down_and_no_stage_imports_another(path):
    if path.name == "__init__.py" and path.parent == PACKAGE:
        return
    here = room(path)
    assert here in LEVEL, f"{here} has no place in LAYERS"
    for target, line in imported_rooms(ast.parse(path.read_text())):
        if target != here:
            assert LEVEL[target] < LEVEL[here], f"{path}:{line} imports {target}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_and_functions_are_small(path):
    source = path.read_text()
    assert len(source.splitlines()) <= LONGEST_FILE
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            statements = sum(isinstance(n, ast.stmt) for n in ast.walk(node)) - 1
            assert statements <= MOST_STATEMENTS, f"{path}: {node.name} has {statements}"


def test_no_drawer_modules_and_no_bare_word_for_the_active_share():
    for path in FILES:
        assert path.stem not in {"utils", "util", "helpers", "common", "misc", "base", "core"}
        assert "sparsity" not in path.read_text().lower(), path


def test_every_public_function_of_the_method_has_a_docstring():
    for folder in ("transport", "moe"):
        for path in sorted((PACKAGE / folder).glob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_":
                    assert ast.get_docstring(node), f"{path.name}: {node.name}"


def test_the_public_names_can_be_imported():
    package = importlib.import_module("dotmoe")
    assert all(hasattr(package, name) for name in package.__all__)
