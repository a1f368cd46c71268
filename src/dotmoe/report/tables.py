"""What is printed at the end of a command: the same figures as the report, on a terminal."""

import json
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dotmoe.report.recovery import MODELS, recovered, results_of
from dotmoe.report.words import millions, percent


def summary(run: Path) -> RenderableType:
    """The end of `dotmoe convert`, from the result files of a run folder."""
    results = json.loads((run / "6_evaluate" / "results.json").read_text(encoding="utf-8"))
    table = _perplexities({"dense": results["dense"], _name(results): results["moe"]})
    where = Text(f"checkpoint  {run / '5_export'}\nreport      {run / '7_report' / 'report.html'}")
    return Group(table, _sizes(results), _parity(results["verification"]), where)


def quickstart_summary(result: dict[str, Any]) -> RenderableType:
    """The end of `dotmoe quickstart`, from `quickstart.json`."""
    table = _perplexities(
        {
            "dense": result["dense"],
            "random split, router trained": result["random_split"],
            "DOT-MoE": result["dot_moe"],
        }
    )
    ratio = Text(f"gap to dense: {percent(result['gap_ratio'])} of the random split's")
    samples = result["samples"]
    texts = [
        Text(f"{name} continues {samples['prompt']!r}:\n{_indented(samples[name])}")
        for name in ("dense", "moe")
    ]
    where = Text(f"checkpoint  {result['checkpoint']}\nreport      {result['report']}")
    return Group(table, ratio, _sizes(result), _parity(result["verification"]), *texts, where)


def recovery_summary(run: Path) -> RenderableType:
    """The end of `dotmoe finetune`, from the result files of a run folder."""
    results = results_of(run)
    table = _perplexities({name: results[key] for key, name in MODELS.items() if key in results})
    where = Text(f"checkpoint  {run / '5_export'}\nreport      {run / '7_report' / 'report.html'}")
    trained = Text(recovered(results))
    return Group(table, trained, _sizes(results), _parity(results["verification"]), where)


def _name(results: dict[str, Any]) -> str:
    """Name of the method that made a run."""
    method: str = results["config"].get("method", "dot_moe")
    return "DOT-MoE" if method == "dot_moe" else method


def _perplexities(results: dict[str, dict[str, Any]]) -> Table:
    first = next(iter(results.values()))
    title = f"perplexity per token, windows of {first['window']}, {first['tokens']:,} tokens"
    table = Table(title=title, title_justify="left")
    table.add_column("model")
    table.add_column("perplexity", justify="right")
    table.add_column("nats a token above dense", justify="right")
    for name, result in results.items():
        above = result["loss"] - first["loss"]
        table.add_row(name, f"{result['perplexity']:.2f}", f"{above:.3f}")
    return table


def _sizes(results: dict[str, Any]) -> Text:
    counts, split = results["parameters"], results["granularity"]
    return Text(
        f"{split['active_experts']} of {split['num_experts']} experts of {split['expert_size']} "
        f"neurons run per token: {millions(counts['active'])} parameters active "
        f"({millions(counts['active_with_routers'])} with routers), "
        f"{millions(counts['stored'])} stored, dense {millions(counts['dense'])}"
    )


def _parity(record: dict[str, Any]) -> Text:
    figures = ", ".join(f"{name.replace('_', ' ')} {_short(v)}" for name, v in record.items())
    return Text(f"export against masked dense model: {figures}")


def _short(value: Any) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str(value)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
