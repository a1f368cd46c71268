"""Does a GPU compute what the CPU computes? The tests marked gpu, and one model on both.

A part of `gpu.py`. The embedded model is converted, repaired, finetuned and exported on each device
with the same options in float32, and the export of the GPU runs in stock Transformers on both.
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import dotmoe
from dotmoe.method.config import RepairConfig
from dotmoe.models.config import LoadConfig
from dotmoe.text.blocks import TokenBlocks
from gpu_part import Asked, Part, asked, figures, loss_curve

REPOSITORY = Path(__file__).resolve().parents[1]
STEPS = 100
"""Steps of the finetuning."""


def main() -> None:
    options = asked(__doc__)
    part = Part("proof", options)
    part.measure("tests", partial(marked_tests, options.device), most=90)
    runs = {
        place: part.measure(f"embedded on {place}", partial(embedded, options, place), most=100)
        for place in dict.fromkeys((options.device, "cpu"))
    }
    part.measure("export on both", partial(export_on_both, options), most=30)
    if all(runs.values()):
        part.measure("difference", partial(difference, runs, options.device), most=5)


def marked_tests(device: str) -> dict[str, Any]:
    """Outcome of the tests marked gpu; a rehearsal runs them on the CPU.

    Raises `RuntimeError` if one fails. Options of pyproject.toml need packages that may be missing.
    """
    line = [sys.executable, "-m", "pytest", "-m", "gpu", "-o", "addopts=", "-q", "-rA"]
    done = subprocess.run(
        [*line, "tests/test_gpu.py"],
        cwd=REPOSITORY,
        env=os.environ | {"TEST_GPU": device},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout, done.stderr, flush=True)
    last = done.stdout.splitlines()[-5:]
    if done.returncode:
        raise RuntimeError(f"pytest ended with status {done.returncode}: {last}")
    return {"output": last}


def embedded(options: Asked, place: str) -> dict[str, Any]:
    """Figures of the embedded model, converted and repaired, and of it finetuned."""
    folder = options.scratch / place
    shared: dict[str, Any] = {
        "load": LoadConfig(device=place, dtype="float32"),
        "data": dotmoe.DataConfig(data=("python-stdlib",), seq_len=256),
        "eval_text": ("python-stdlib-heldout",),
        "eval_tokens": 2_048 if options.tiny else 16_384,
    }
    tokens = 2_048 if options.tiny else None
    repairing = RepairConfig(repair_tokens=tokens)
    converted, tuned = str(folder / "converted"), str(folder / "finetuned")
    config = dotmoe.recipe(model="embedded", out=converted, repairing=repairing, **shared)
    dotmoe.convert(config)
    how = dotmoe.FinetuneConfig(
        train="everything",
        steps=3 if options.tiny else STEPS,
        batch_size=4,
        lr=6e-4,
        lr_router=0.0,
        kl_weight=1.0,
    )
    dotmoe.finetune(dotmoe.finetune_recipe(run=converted, out=tuned, finetune=how, **shared))
    return {
        "converted": figures(Path(converted)),
        "finetuned": figures(Path(tuned)) | loss_curve(Path(tuned)),
    }


@torch.no_grad()
def export_on_both(options: Asked) -> dict[str, Any]:
    """Logits of the GPU's export in stock Transformers on both devices: error and same choices."""
    run = options.scratch / options.device / "converted"
    tokens_BT = TokenBlocks.load(run / "0_data/heldout.safetensors").tokens_BT[:4].long()
    logits = []
    for place in ("cpu", options.device):
        model = AutoModelForCausalLM.from_pretrained(run / "5_export", dtype=torch.float32)
        logits.append(model.to(place)(tokens_BT.to(place)).logits.cpu())
    error, scale = (logits[1] - logits[0]).norm(), logits[0].norm()
    same = (logits[1].argmax(-1) == logits[0].argmax(-1)).float().mean()
    return {"relative_error": float(error / scale), "same_top1": float(same)}


def difference(runs: dict[str, Any], device: str) -> dict[str, Any]:
    """Perplexities on the GPU over those on the CPU."""
    found: dict[str, Any] = {}
    for stage in ("converted", "finetuned"):
        mine, other = (runs[place][stage]["perplexity"] for place in (device, "cpu"))
        found[stage] = {name: mine[name] / other[name] for name in mine}
    return found


if __name__ == "__main__":
    main()
