"""docs/paper_map.md: every label of the paper is there, and what it points to exists."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAPER = ROOT.parent / "shared" / "paper" / "dot-moe.tex"
STATUSES = {"done", "partly", "not run", "not built", "text"}
LABEL = re.compile(r"(?:def|eq|alg|sec|app|tab|fig):\w+")
NUM_LABELS = 61


def rows():
    """Cells of every row that begins with a label."""
    text = (ROOT / "docs" / "paper_map.md").read_text(encoding="utf-8")
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and LABEL.fullmatch(cells[0].strip("`")):
            found.append(cells)
    return found


def quoted(cell):
    return re.findall(r"`([^`]+)`", cell)


def resolves(name):
    """Whether a dotted name is a module, or something in one."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def functions_of(file):
    return {node.name for node in ast.parse(file.read_text()).body if hasattr(node, "name")}


def test_every_label_has_one_row_and_a_status():
    labels = [cells[0].strip("`") for cells in rows()]
    assert len(labels) == len(set(labels)) == NUM_LABELS
    for cells in rows():
        assert cells[4] in STATUSES, cells[0]


def test_the_labels_are_those_of_the_paper():
    if not PAPER.is_file():
        pytest.skip(f"{PAPER} is not there")
    labels = set(re.findall(r"\\label\{([^}]+)\}", PAPER.read_text(encoding="utf-8")))
    assert {cells[0].strip("`") for cells in rows()} == labels


def test_code_and_experiments_exist():
    for label, _, code, _, status in rows():
        assert quoted(code) or status == "not built", label
        for name in quoted(code):
            if name.startswith("dotmoe."):
                assert resolves(name), f"{label}: {name}"
            else:
                assert (ROOT / name).exists(), f"{label}: {name}"


def test_tests_exist():
    text = (ROOT / "docs" / "paper_map.md").read_text(encoding="utf-8")
    for file, _, function in re.findall(r"(tests/[\w/]+\.py)(::)?(\w+)?", text):
        path = ROOT / file
        assert path.is_file(), file
        assert not function or function in functions_of(path), f"{file}::{function}"


def test_what_is_done_and_computes_has_a_test():
    for label, _, _, test, status in rows():
        if status == "done":
            assert quoted(test), label


def test_every_table_and_figure_has_an_experiment():
    folders = {file.parent.name for file in (ROOT / "experiments").glob("*/experiment.toml")}
    named = {
        Path(name).name for cells in rows() for name in quoted(cells[2]) if "experiments/" in name
    }
    assert folders <= named
    covered_by_code_alone = {
        "tab:hyperparams_moefication",
        "tab:hyperparams_sft",
        "fig:ablation_overview",
    }
    for label, _, code, _, _ in rows():
        is_measured = label.strip("`").startswith(("tab:", "fig:"))
        if is_measured and label.strip("`") not in covered_by_code_alone:
            assert any(name.startswith("experiments/") for name in quoted(code)), label
