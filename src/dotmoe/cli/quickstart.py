"""The whole method on the embedded model and the local Python standard library, in minutes."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from dotmoe.common.files import write_json
from dotmoe.common.options import at_least
from dotmoe.common.progress import Progress
from dotmoe.measure.evaluate import evaluate
from dotmoe.measure.evaluate.models import EvaluateConfig
from dotmoe.measure.report.page import html_report
from dotmoe.models.checkpoint import EMBEDDED
from dotmoe.pipeline import convert
from dotmoe.run.config import RunConfig, recipe
from dotmoe.run.folder import provenance

PROMPT = "def read_config(path):\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class QuickstartConfig:
    """The quickstart: dense, random split and DOT-MoE side by side."""

    out: str = "quickstart-run"
    """Folder to write; the same command resumes there if it was stopped."""
    steps: Annotated[int, at_least(1)] = 300
    """Alignment steps, the same for the random split and for DOT-MoE."""
    seed: Annotated[int, at_least(0)] = 0
    """Seed of initial values and data order."""


def quickstart(config: QuickstartConfig, progress: Progress) -> dict[str, Any]:
    """Convert the embedded model twice, measure both, and write `quickstart.json`.

    The random split has the same E, expert size, k, data, router start, steps, learning rates and
    repair; only its assignment stays as it was drawn.
    """
    started = time.monotonic()
    out = Path(config.out)
    conversions = []
    for name, run in run_configs(config).items():
        progress.log(f"{name}:")
        conversions.append(convert(run, progress))
    random, learned = (conversion.results for conversion in conversions)
    model = str(conversions[-1].export)
    sides = evaluate(EvaluateConfig(model=model, against=EMBEDDED, generate=60, prompts=(PROMPT,)))
    texts = [sides[side]["texts"][0] for side in ("against", "model")]
    summary = {
        "origin": "measured",
        "dense": learned["dense"],
        "random_split": random["frozen"],
        "random_split_repaired": random["moe"],
        "dot_moe": learned["frozen"],
        "dot_moe_repaired": learned["moe"],
        **{name: learned[name] for name in ("granularity", "parameters", "verification")},
        "steps": config.steps,
        "samples": {"prompt": PROMPT, "dense": texts[0], "moe": texts[1]},
        "seconds": time.monotonic() - started,
        "checkpoint": model,
        "report": str(out / "report.html"),
        "provenance": provenance(config.seed),
    }
    write_json(out / "quickstart.json", summary)
    html_report(out)
    return summary


def run_configs(config: QuickstartConfig) -> dict[str, RunConfig]:
    """Configs of the two runs, which differ only in the split; both are repaired."""
    out, base = Path(config.out), recipe("quickstart", seed=config.seed)
    align = replace(base.align, steps=config.steps)
    learned = replace(base, out=str(out / "dot_moe"), align=align, repair=True)
    router = replace(base.baseline, split_router="ridge", router_steps=config.steps)
    random = replace(learned, out=str(out / "random_split"), method="random_split", baseline=router)
    return {"random split": random, "DOT-MoE": learned}
