"""Two small conversions whose numbers are kept, and the command that writes them anew.

    python tests/e2e/golden_conversions.py   # overwrites golden/*.json: for a change of the method

The numbers in `golden/` were written at commit 59ca526, before the alignment step was made fast:
they are those of the plain operations that its fast paths replaced.
"""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import dotmoe
from dotmoe.align import AlignConfig
from dotmoe.calibrate import CalibrateConfig
from dotmoe.config import RunConfig
from dotmoe.data import DataConfig
from dotmoe.export import ExportConfig
from dotmoe.granularity import ExpertsConfig

GOLDEN = Path(__file__).parent / "golden"
TEXT = Path(__file__).resolve().parents[2] / "LICENSE"
LOGGED = ("loss", "kl", "ce", "z", "balance", "grad_norm")


def conversions(out: Path) -> dict[str, RunConfig]:
    """Our recipe and the paper's, twelve steps of 512 tokens each on the embedded model."""
    text = out / "text.txt"
    text.write_text(TEXT.read_text())
    small = {
        "model": "embedded",
        "data": DataConfig(data=(str(text),), seq_len=128),
        "experts": ExpertsConfig(expert_size=16, active=0.25),
        "export": ExportConfig(scale_tokens=256, verify_tokens=128),
        "eval_tokens": 512,
    }
    steps = AlignConfig(steps=12, batch_size=4, micro_batch_size=2, lr=1e-2, max_epochs=100.0)
    ours, paper = (replace(dotmoe.recipe(name), **small) for name in ("default", "paper"))
    return {
        "default": replace(
            ours,
            out=str(out / "default"),
            align=steps,
            calibrate=CalibrateConfig(calibration_tokens=1024),
        ),
        "paper": replace(paper, out=str(out / "paper"), align=replace(steps, surrogate="softmax")),
    }


def numbers(config: RunConfig) -> dict[str, object]:
    """What a conversion logs and measures."""
    results = dotmoe.convert(config).results
    lines = (Path(config.out) / "2_align" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    return {
        "steps": [{name: step[name] for name in LOGGED} for step in steps],
        "perplexity": {name: results[name]["perplexity"] for name in ("dense", "moe")},
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for name, config in conversions(Path(folder)).items():
            text = json.dumps(numbers(config), indent=1) + "\n"
            (GOLDEN / f"{name}.json").write_text(text)
