"""Runs as commands leave them: one just converted, and one measured as its own page proposes."""

import json
import shlex
from pathlib import Path

import pytest
from pages import HOSTILE, ROOT, read_page

from dotmoe.cli import run
from dotmoe.measure.report.page import html_report
from dotmoe.measure.report.plots import quality_svg
from dotmoe.models.identity import fingerprint
from runs import TEXT

TASKS = {
    "boolq": lambda i: {"passage": f"Crow {i} flew.", "question": "did it fly", "label": i % 2},
    "piqa": lambda i: {"goal": f"count {i}", "sol1": f"say {i} " * 4, "sol2": "no", "label": i % 2},
}
"""A row of each benchmark task."""


@pytest.fixture(autouse=True)
def _pictures(monkeypatch):
    monkeypatch.setattr("dotmoe.measure.report.page.quality_svg", quality_svg)


def measure(line):
    assert run(shlex.split(line.removeprefix("dotmoe "))) == 0


@pytest.fixture(scope="session")
def measured(finished, tmp_path_factory):
    """A run measured by the commands that its own page proposes, in the folder that holds it."""
    folder = tmp_path_factory.mktemp("measured")
    made = finished.copied_to(folder / "run").folder
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("dotmoe.measure.report.page.quality_svg", quality_svg)
        Path("HELD_OUT.txt").write_text(f"{HOSTILE}\n{TEXT[:6000]}")
        page = read_page(html_report(made))
        for proposed in page.commands:
            if "--text" in proposed:
                measure(f"{proposed} --max-tokens 600")
            elif "--generate" in proposed:
                measure(proposed.replace("--generate 64", "--generate 8"))
            elif "analyse" in proposed:
                measure(f"{proposed} --tokens 256")
        on_text = f"evaluate {made} --out {made}/6_evaluate --text HELD_OUT.txt"
        measure(f"{on_text} --against {finished.source} --max-tokens 300")
        for task, row in TASKS.items():
            for split in ("train", "validation"):
                data = folder / "data" / task / f"{split}.jsonl"
                data.parent.mkdir(parents=True, exist_ok=True)
                data.write_text("".join(json.dumps(row(index)) + "\n" for index in range(8)))
        patch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
        measure(f"evaluate {made} --against {finished.source} --tasks {' '.join(TASKS)} --shots 0 "
                f"--limit 6 --task-data {folder / 'data'} --device cpu")  # fmt: skip
    case, *_ = json.loads((ROOT / "results" / "serving_speed.json").read_text())["cases"].values()
    weights = {"active_experts": 3, "experts": 12, "stored_bytes": 400_000}
    for side in ("dense", "moe"):
        case[side] |= {"dtype": "float32", "weights": weights}
    case["moe"]["fingerprint"] = fingerprint(made / "5_export")
    case["dense"]["fingerprint"] = fingerprint(finished.source)
    (made / "6_evaluate" / "bench.json").write_text(json.dumps(case))
    html_report(made)
    return made
