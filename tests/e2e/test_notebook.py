"""The notebook of `examples/`: its cells run in order, and it shows what they give.

To make its outputs again: `jupyter nbconvert --to notebook --execute --inplace`, in a clean folder.
Oracle: the stored outputs; the cells themselves compare nothing.
"""

import ast
import inspect
import json
import re
from pathlib import Path

import pytest

import dotmoe

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples/first_conversion.ipynb"
CELLS = [
    cell
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    if cell["cell_type"] == "code"
]


def source_of(cell):
    return "".join(cell["source"])


def stored(cell):
    """What a cell shows, as plain text."""
    shown = []
    for output in cell["outputs"]:
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        shown.append("".join(text))
    return "\n".join(shown)


def run_cell(source, names):
    """The value of a cell's last expression, None without one."""
    *body, last = ast.parse(source).body
    if not isinstance(last, ast.Expr):
        body.append(last)
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    return None


def test_every_cell_was_executed_without_error():
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    kinds = {output["output_type"] for cell in CELLS for output in cell["outputs"]}
    assert kinds <= {"execute_result", "display_data", "stream"}
    assert all(stored(cell) for cell in CELLS)


def test_every_keyword_of_a_cell_is_an_option():
    calls = [
        node
        for cell in CELLS
        for node in ast.walk(ast.parse(source_of(cell)))
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("dotmoe.")
    ]
    assert len(calls) >= 3
    for call in calls:
        function = getattr(dotmoe, call.func.attr)
        given = {keyword.arg for keyword in call.keywords}
        assert given <= inspect.signature(function).parameters.keys()


@pytest.mark.slow
def test_the_cells_give_what_the_notebook_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    for cell in CELLS:
        capsys.readouterr()
        value = run_cell(source_of(cell), names)
        printed = capsys.readouterr().out
        if "generate(" in source_of(cell):  # samples differ by machine
            assert printed.splitlines()[0] == stored(cell).splitlines()[0]
            continue
        said = stored(cell)
        shown = printed if value is None else repr(value)
        numbers, expected = (
            [float(number) for number in re.findall(r"\b\d+\.\d+\b", text)]
            for text in (shown, said.splitlines()[-1] if value is None else said)
        )
        known = expected[-len(numbers) :] if numbers else []
        assert numbers == pytest.approx(known, rel=0.03, abs=0.02)
