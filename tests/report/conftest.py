"""Runs as commands leave them: one just converted, and one measured as its own page proposes."""

import json
import shlex
from pathlib import Path

import pytest
from pages import HOSTILE, ROOT, read_page

from dotmoe.cli import run
from dotmoe.report import html_report
from runs import TEXT


def measure(options):
    assert run(shlex.split(options.removeprefix("dotmoe "))) == 0


@pytest.fixture(scope="session")
def measured(finished, tmp_path_factory):
    """A run measured by the commands that its own page proposes, in the folder that holds it."""
    folder = tmp_path_factory.mktemp("measured")
    made = finished.copied_to(folder / "run").folder
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("HELD_OUT.txt").write_text(f"{HOSTILE}\n{TEXT[:6000]}")
        page = read_page(html_report(made))
        for proposed in page.commands:
            if "--text" in proposed or "analyse" in proposed:
                small = (
                    " --tokens 256 --points 90" if "analyse" in proposed else " --max-tokens 600"
                )
                measure(proposed.replace("--generate 64", "--generate 8") + small)
        measure(f"evaluate {made} --text HELD_OUT.txt --against {finished.source} --max-tokens 300 "
                f"--out {made}/6_evaluate")  # fmt: skip
        measure(f"evaluate {made} --text HELD_OUT.txt --word-perplexity 64 128 "
                f"--out {made}/6_evaluate")  # fmt: skip
    cases = json.loads((ROOT / "results" / "serving_speed.json").read_text())["cases"]
    (made / "6_evaluate" / "bench.json").write_text(json.dumps(next(iter(cases.values()))))
    html_report(made)
    return made
