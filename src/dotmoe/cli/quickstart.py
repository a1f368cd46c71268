"""The embedded model with half of its FFN, fitted to the local Python library, beside its rival."""

import time
from dataclasses import replace
from pathlib import Path
from textwrap import indent

from rich.console import Group, RenderableType
from rich.text import Text

from dotmoe.common.files import Values, write_json
from dotmoe.common.progress import Progress
from dotmoe.common.tables import to_rich, whole_line
from dotmoe.measure.config import EvaluateConfig
from dotmoe.measure.evaluate import evaluate
from dotmoe.measure.report import RIVALS
from dotmoe.measure.report.page import html_report
from dotmoe.measure.report.sections import in_short, overview
from dotmoe.models.source import EMBEDDED
from dotmoe.pipeline.convert import convert
from dotmoe.run.config import QuickstartConfig, RunConfig, recipe
from dotmoe.run.folder import STAGES
from dotmoe.run.provenance import provenance
from dotmoe.text.config import DataConfig

PROMPTS = (
    "import os\nimport sys\n\n",
    "def read_config(path):\n    with open(path) as file:\n",
    "class TestStack(unittest.TestCase):\n\n    def setUp(self):\n        self.stack = Stack()\n\n"
    "    def test_push(self):\n",
)
_TOKENS, _TEMPERATURE = 60, 0.8
_EXPECTED = (
    "A model of 3 million parameters writes Python that looks like Python: it keeps indentation, "
    "names and phrases of its library, and means nothing. So compare the two texts with each other."
)
_STATIC = "static pruning, same repair"


def quickstart(config: QuickstartConfig, progress: Progress) -> Values:
    """Convert the embedded model twice, measure both, and write `quickstart.json`.

    One run is the default conversion, but with half of the FFN: with more, methods hardly differ
    on so small a model. The other prunes statically: it keeps as many neurons as the conversion
    runs for a token, always the same, with the same text and repair. The report of the conversion
    shows both.
    """
    started, worked = time.monotonic(), time.process_time()
    conversions = {}
    for name, run in run_configs(config).items():
        progress.log(f"{name}:")
        conversions[name] = convert(run, progress)
    made = conversions["dot_moe"]
    static, dotmoe = conversions["static_pruning"].results, made.results
    measured = made.folder / STAGES["evaluate"]
    asked = EvaluateConfig(
        model=str(made.export),
        against=EMBEDDED,
        out=str(measured),
        generate=_TOKENS,
        prompts=PROMPTS,
        temperature=_TEMPERATURE,
    )
    sides = evaluate(asked)["generation"]
    texts = zip(PROMPTS, sides["against"]["texts"], sides["model"]["texts"], strict=True)
    write_json(measured / f"{RIVALS}.json", {_STATIC: static["moe"]})
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
        "checkpoint": str(made.export),
        "report": str(html_report(made.folder)),
        "provenance": provenance(config.seed),
    }
    write_json(Path(config.out) / "quickstart.json", summary)
    return summary


def shown_quickstart(result: Values) -> RenderableType:
    """What `dotmoe quickstart` prints when it finishes, from `quickstart.json`."""
    models = {
        "dense": result["dense"],
        "frozen": result["dotmoe_start"],
        "repaired": result["dotmoe"],
        _STATIC: result["static_pruning"],
    }
    paragraphs = [
        in_short(result["dotmoe"], result["dense"], result["parameters"])
        + " Static pruning keeps as many neurons, the same for every token.",
        _EXPECTED,
    ]
    for sample in result["samples"]:
        paragraphs.append(f"prompt:\n{indent(sample['prompt'].strip(), '    ')}")
        for name in ("dense", "dotmoe"):
            paragraphs.append(f"continued by {name}:\n{indent(sample[name].strip(), '    ')}")
    table = overview(models, result["parameters"])
    return Group(
        to_rich(table),
        Text("\n" + "\n\n".join(paragraphs) + "\n"),
        whole_line(f"checkpoint  {result['checkpoint']}\nreport      {result['report']}"),
    )


def run_configs(config: QuickstartConfig) -> dict[str, RunConfig]:
    """Configs of the two runs by method, which differ in the method alone."""
    out = Path(config.out)
    data = DataConfig(data=("python-stdlib",), seq_len=256)
    base = recipe(
        model=EMBEDDED,
        active=0.5,
        data=data,
        eval_text=("python-stdlib-heldout",),
        seed=config.seed,
    )
    return {
        method: replace(base, out=str(out / method), method=method)
        for method in ("static_pruning", "dot_moe")
    }
