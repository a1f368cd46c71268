"""The default conversion of the embedded model on the local Python library, beside its rival."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from dotmoe.common.files import write_json
from dotmoe.common.progress import Progress
from dotmoe.measure.config import EvaluateConfig
from dotmoe.measure.evaluate import evaluate
from dotmoe.measure.report.page import html_report
from dotmoe.models.checkpoint import EMBEDDED
from dotmoe.pipeline import convert
from dotmoe.run.config import QuickstartConfig, RunConfig, recipe
from dotmoe.run.folder import provenance
from dotmoe.text.config import DataConfig

PROMPTS = (
    "import os\nimport sys\n\n",
    "def read_config(path):\n    with open(path) as file:\n",
    "class TestStack(unittest.TestCase):\n\n    def setUp(self):\n        self.stack = Stack()\n\n"
    "    def test_push(self):\n",
)
_TOKENS, _TEMPERATURE = 60, 0.8


def quickstart(config: QuickstartConfig, progress: Progress) -> dict[str, Any]:
    """Convert the embedded model twice, measure both, and write `quickstart.json`.

    One run is the default conversion. The other prunes statically: it keeps as many neurons as the
    conversion runs for a token, always the same, with the same text and repair.
    """
    started, worked = time.monotonic(), time.process_time()
    out = Path(config.out)
    conversions = {}
    for name, run in run_configs(config).items():
        progress.log(f"{name}:")
        conversions[name] = convert(run, progress)
    static, dotmoe = (conversions[name].results for name in ("static_pruning", "dot_moe"))
    model = str(conversions["dot_moe"].export)
    asked = EvaluateConfig(
        model=model, against=EMBEDDED, generate=_TOKENS, prompts=PROMPTS, temperature=_TEMPERATURE
    )
    sides = evaluate(asked)["generation"]
    texts = zip(PROMPTS, sides["against"]["texts"], sides["model"]["texts"], strict=True)
    summary = {
        "origin": "measured",
        "dense": dotmoe["dense"],
        "dotmoe_start": dotmoe["frozen"],
        "dotmoe": dotmoe["moe"],
        "static_pruning": static["moe"],
        **{name: dotmoe[name] for name in ("granularity", "parameters", "verification")},
        "samples": [{"prompt": p, "dense": dense, "dotmoe": moe} for p, dense, moe in texts],
        "seconds": time.monotonic() - started,
        "cpu_seconds": time.process_time() - worked,
        "checkpoint": model,
        "report": str(out / "report.html"),
        "provenance": provenance(config.seed),
    }
    write_json(out / "quickstart.json", summary)
    html_report(out)
    return summary


def run_configs(config: QuickstartConfig) -> dict[str, RunConfig]:
    """Configs of the two runs by method, which differ in the method alone."""
    out = Path(config.out)
    data = DataConfig(data=("python-stdlib",), seq_len=256)
    base = recipe(model=EMBEDDED, data=data, eval_text=("python-stdlib-heldout",), seed=config.seed)
    return {
        method: replace(base, out=str(out / method), method=method)
        for method in ("static_pruning", "dot_moe")
    }
