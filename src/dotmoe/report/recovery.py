"""The report of recovery training: dense, converted and finetuned model side by side."""

import json
from pathlib import Path
from typing import Any

from dotmoe.report.html_page import html_report
from dotmoe.report.words import percent

MODELS = {"dense": "dense", "converted": "converted", "moe": "finetuned"}
"""What the models of `results.json` are called."""


def recovery_report(run: Path, folder: Path) -> Path:
    """Write `report.md` and `report.html` into `folder`; returns the second, which has more."""
    results = results_of(run)
    config = results["config"]
    sections = [
        f"# Recovery training of {config['run']}\n",
        f"{recovered(results)}\n",
        _quality(results),
        _training(run / "4_finetune" / "metrics.jsonl"),
        "## How it was made\n\n`dotmoe finetune --config config.json` in this folder repeats it.\n",
        "```json",
        json.dumps({"config": config, "provenance": results["provenance"]}, indent=2),
        "```\n",
    ]
    (folder / "report.md").write_text("\n".join(sections), encoding="utf-8")
    return html_report(run, folder / "report.html")


def results_of(run: Path) -> dict[str, Any]:
    """Contents of `6_evaluate/results.json`."""
    text = (run / "6_evaluate" / "results.json").read_text(encoding="utf-8")
    results: dict[str, Any] = json.loads(text)
    return results


def recovered(results: dict[str, Any]) -> str:
    """What of the loss was made up for, in a sentence."""
    trained = f"{results['steps']:,} steps, {results['tokens']:,} tokens"
    train = results["config"]["finetune"]["train"]
    after = results["moe"]["loss"] - results["dense"]["loss"]
    if "converted" not in results:
        return f"finetuned ({train}): {trained}; {after:.3f} nats a token above dense"
    before = results["converted"]["loss"] - results["dense"]["loss"]
    share = f", {percent(1 - after / before)} made up for" if before > 0 else ""
    return (
        f"finetuned ({train}): {trained}; from {before:.3f} to {after:.3f} nats a token above "
        f"dense{share}"
    )


def _quality(results: dict[str, Any]) -> str:
    rows = [
        f"| {name} | {results[key]['perplexity']:.3f} | {results[key]['loss']:.4f} |"
        for key, name in MODELS.items()
        if key in results
    ]
    dense = results["dense"]
    return "\n".join(
        [
            "## Quality\n",
            "| model | perplexity (token) | loss, nats a token |",
            "|---|---|---|",
            *rows,
            f"\nText: {', '.join(dense['text'])}. {dense['protocol']}\n",
        ]
    )


def _training(metrics: Path) -> str:
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    shown = sorted({round(i * (len(lines) - 1) / 10) for i in range(11)})
    columns = [name for name in ("step", "ce", "kl", "balance", "grad_norm") if name in lines[0]]
    rows = ["| " + " | ".join(f"{lines[i][name]:.5g}" for name in columns) + " |" for i in shown]
    seconds = sum(line["seconds"] for line in lines)
    header = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([f"## Training: {len(lines)} steps, {seconds:.0f} s\n", *header, *rows, ""])
