"""The report of one run, in short as Markdown: what was lost, what was gained, how it was made."""

import json
import math
from pathlib import Path
from typing import Any

from dotmoe.report.html_page import html_report
from dotmoe.report.words import millions, percent


def report(run: Path, folder: Path) -> Path:
    """Write `report.md` and `report.html` into `folder` from the result files of a run.

    Returns:
        The second, which has more: plots, samples, what was measured later.
    """
    results = json.loads((run / "6_evaluate" / "results.json").read_text(encoding="utf-8"))
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    sections = [
        f"# {config['model']} as a Mixture-of-Experts\n",
        _in_words(results),
        _quality(results),
        _size(results),
        _verification(results["verification"]),
        _training(run / "2_align" / "metrics.jsonl"),
        _made_by(config, results["provenance"]),
    ]
    (folder / "report.md").write_text("\n".join(sections), encoding="utf-8")
    return html_report(run, folder / "report.html")


def _in_words(results: dict[str, Any]) -> str:
    dense, moe = results["dense"], results["moe"]
    counts, split = results["parameters"], results["granularity"]
    loss = moe["loss"] - dense["loss"]
    saved = 1 - counts["active"] / counts["dense"]
    return (
        f"Each token runs {split['active_experts']} of {split['num_experts']} experts a layer. "
        f"**Gained:** {percent(saved)} fewer parameters are touched per token "
        f"({millions(counts['active'])} of {millions(counts['dense'])}). "
        f"**Lost:** {loss:.3f} nats per token; perplexity {dense['perplexity']:.2f} became "
        f"{moe['perplexity']:.2f}. No dense weight was changed.\n"
    )


def _quality(results: dict[str, Any]) -> str:
    dense, moe = results["dense"], results["moe"]
    rows = [
        f"| {name} | {r['perplexity']:.3f} | {r['loss']:.4f} |"
        for name, r in (("dense", dense), ("MoE, as exported", moe))
    ]
    return "\n".join(
        [
            "## Quality\n",
            "| model | perplexity (token) | loss, nats a token |",
            "|---|---|---|",
            *rows,
            f"\nText: {', '.join(dense['text'])}. {dense['protocol']}\n",
        ]
    )


def _size(results: dict[str, Any]) -> str:
    names = {
        "stored": "stored, routers included",
        "active": "active per token",
        "active_with_routers": "active per token, with routers",
        "active_without_embeddings": "active per token, without embeddings and head",
        "dense": "dense model",
    }
    rows = [f"| {text} | {results['parameters'][key]:,} |" for key, text in names.items()]
    return "\n".join(["## Size\n", "| parameters | number |", "|---|---|", *rows, ""])


def _verification(record: dict[str, Any]) -> str:
    rows = [f"| {name} | {_figure(value)} |" for name, value in record.items()]
    return "\n".join(
        [
            "## The exported checkpoint against the masked dense model\n",
            "Loaded with stock Transformers, on real text.\n",
            "| check | value |",
            "|---|---|",
            *rows,
            "",
        ]
    )


def _training(metrics: Path) -> str:
    if not metrics.exists():
        return "## Alignment\n\nNone: the start was extracted as it is.\n"
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    shown = sorted({0, *(round(i * (len(lines) - 1) / 10) for i in range(11))})
    columns = [c for c in ("step", "kl", "ce", "balance", "tau", "moved_fraction") if c in lines[0]]
    rows = [
        "| " + " | ".join(_figure(lines[i][column]) for column in columns) + " |" for i in shown
    ]
    seconds = sum(line["seconds"] for line in lines)
    return "\n".join(
        [
            f"## Alignment: {len(lines)} steps, {seconds:.0f} s\n",
            "| " + " | ".join(columns) + " |",
            "|" + "---|" * len(columns),
            *rows,
            "",
        ]
    )


def _made_by(config: dict[str, Any], provenance: dict[str, Any]) -> str:
    return "\n".join(
        [
            "## How it was made\n",
            "`dotmoe convert --config config.json` in this folder repeats it.\n",
            "```json",
            json.dumps({"config": config, "provenance": provenance}, indent=2),
            "```",
            "",
        ]
    )


def _figure(value: Any) -> str:
    if isinstance(value, float) and not math.isnan(value):
        return f"{value:.4g}"
    return str(value)
