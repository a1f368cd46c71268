"""README and docs: what they name exists, what is generated is current; the map of the paper.

And the examples in docstrings, which give what they say.
"""

import ast
import doctest
import importlib
import pkgutil
import re
import tomllib
from pathlib import Path

import pytest

import dotmoe
import update_documents as updater
from dotmoe.rivals.config import BASELINES, PRUNERS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
MAP = (ROOT / "docs/research/paper_map.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAPER = ROOT.parent / "shared" / "paper" / "dot-moe.tex"
STATUSES = {"done", "partly", "not run", "not built", "text"}
LABEL = re.compile(r"(?:def|eq|alg|sec|app|tab|fig):\w+")
NUM_LABELS = 61
COVERED_BY_CODE_ALONE = {
    "tab:hyperparams_moefication",
    "tab:hyperparams_sft",
    "fig:ablation_overview",
}
WITH_EXAMPLES = [p for p in sorted(ROOT.glob("src/**/*.py")) if ">>> " in p.read_text()]
CELLS = [[cell.strip() for cell in line.strip("|").split("|")] for line in MAP.splitlines()]
ROWS = {
    cells[0].strip("`"): cells[1:]
    for cells in CELLS
    if len(cells) == 5 and LABEL.fullmatch(cells[0].strip("`"))
}
"""By label: what it is, code, tests, status."""


def quoted(cell):
    return re.findall(r"`([^`]+)`", cell)


def test_numbers_of_documents_are_those_of_the_files():
    for document in updater.documents():
        text = document.read_text(encoding="utf-8")
        assert updater.rendered(text) == text, document
        assert (
            text.count("<!-- from ")
            == text.count("<!-- end -->")
            == len(updater.PART.findall(text))
        )


def test_every_page_is_in_the_menu_of_the_site():
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages <= {*re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)}


def test_the_front_page_is_short_and_its_counts_are_those_of_the_code():
    assert len(re.sub(r"<!--.*?-->", "", README, flags=re.DOTALL).split()) <= 900
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["description"] == dotmoe.__doc__.splitlines()[0].rstrip(".")
    assert project["requires-python"] == ">=3.11"
    assert "python-3.11" in README
    assert f"licence-{project['license'].replace('-', '_')[:10]}" in README
    assert f"\nversion: {dotmoe.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"{len(BASELINES)} other ways to split and {len(PRUNERS)} ways to prune" in README
    tuned = dotmoe.finetune_recipe()
    tokens = tuned.finetune.steps * tuned.finetune.batch_size * tuned.data.seq_len
    assert f"{tokens:,} tokens of\ndistillation" in README


def test_the_papers_recipe_and_the_projects_default_are_told_apart():
    paper = dotmoe.recipe("paper")
    assert paper.align.steps * paper.align.batch_size * paper.data.seq_len == updater.PAPER_TOKENS
    for page in [*DOCUMENTS, *ROOT.glob("experiments/**/README.md")]:
        text = page.read_text()
        assert not re.findall(r"^\|.*\bDOT-MoE(?! \(paper\))", text, re.MULTILINE), page
        served = re.findall(r"^vllm serve .*", text, re.MULTILINE)
        assert all("--dtype" in line for line in served), page


def test_the_map_has_every_label_of_the_paper():
    assert len(ROWS) == len([c for c in CELLS if c[0].strip("`") in ROWS]) == NUM_LABELS
    if not PAPER.is_file():
        pytest.skip(f"{PAPER} is not there")
    assert set(ROWS) == set(re.findall(r"\\label\{([^}]+)\}", PAPER.read_text(encoding="utf-8")))


def test_what_the_map_names_exists():
    for label, (_, code, tests, status) in ROWS.items():
        assert status in STATUSES, label
        assert quoted(code) or status == "not built", label
        assert quoted(tests) or status != "done", label
        for name in quoted(code):
            if name.startswith("dotmoe."):
                pkgutil.resolve_name(name)
            else:
                assert (ROOT / name).exists(), name
        if label.startswith(("tab:", "fig:")) and label not in COVERED_BY_CODE_ALONE:
            assert any(name.startswith("experiments/") for name in quoted(code)), label


def test_tests_and_experiments_of_the_map_exist():
    for file, _, function in re.findall(r"(tests/[\w/]+\.py)(::)?(\w+)?", MAP):
        names = {getattr(node, "name", "") for node in ast.parse((ROOT / file).read_text()).body}
        assert not function or function in names, f"{file}::{function}"
    folders = {file.parent.name for file in (ROOT / "experiments").glob("*/README.md")}
    assert folders <= {Path(name).name for _, code, *_ in ROWS.values() for name in quoted(code)}


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.stem)
def test_examples_in_docstrings_give_what_they_say(path):
    parts = path.relative_to(ROOT / "src").with_suffix("").parts
    module = importlib.import_module(".".join(part for part in parts if part != "__init__"))
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.attempted
    assert not result.failed
