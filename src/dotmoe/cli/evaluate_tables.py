"""What was measured, as tables for a person."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from dotmoe.evaluate.task_sets import TASK_SETS

LABELS = ("against", "model")
"""The dense model first, as in the paper's tables."""

_SHOWN = 4
"""Prompts whose continuations are shown."""


def tasks_table(result: dict[str, Any], names: Sequence[str]) -> Table:
    """Per cent and standard error of every task, in the metric of the paper, and averages."""
    labels = [label for label in LABELS if label in result]
    table = Table(title="per cent, with standard error")
    table.add_column("task [shots, metric]")
    for label in labels:
        table.add_column(result[label]["name"], justify="right")
    for task, first in result["model"]["tasks"].items():
        for score in first["scores"]:
            if not (score["is_main"] or set(score["sets"]) & set(names)):
                continue
            cells = [_cell(result[label]["tasks"][task], score) for label in labels]
            name = f"{task} [{score['shots']}, {score['metric']}]"
            table.add_row(name.replace("[", r"\["), *cells)
    for name in result["model"]["averages"]:
        cells = [f"{100 * result[label]['averages'][name]:.1f}" for label in labels]
        table.add_row(f"average of the {len(TASK_SETS[name])} of {name}", *cells)
    return table


def _cell(task: dict[str, Any], like: dict[str, Any]) -> str:
    key = (like["task"], like["metric"])
    score = next(each for each in task["scores"] if (each["task"], each["metric"]) == key)
    metric, value, error = score["metric"], score["value"], score["stderr"]
    if "perplexity" in metric or "bits" in metric:
        return f"{value:.3f}"
    return f"{100 * value:.1f}" + ("" if error is None else f" ± {100 * error:.1f}")


def notes_of(result: dict[str, Any]) -> list[str]:
    """What must be known of the tasks, a line each, once."""
    return list(
        dict.fromkeys(
            f"{task}: {note}."
            for label in LABELS
            if label in result
            for task, found in result[label]["tasks"].items()
            for note in found["notes"]
        )
    )


def perplexity_table(result: dict[str, Any]) -> Table:
    """Perplexity a token of each model."""
    sides = [result[label] for label in LABELS if label in result] or [result]
    table = Table(title="perplexity a token", caption=sides[0]["protocol"])
    for column in ("", "perplexity", "nats a token", "bits a byte"):
        table.add_column(column, justify="left" if not column else "right")
    for side in sides:
        figures = f"{side['perplexity']:.3f}", f"{side['loss']:.4f}", f"{side['bits_per_byte']:.4f}"
        table.add_row(side["name"], *figures)
    return table


def word_table(result: dict[str, Any]) -> Table:
    """Perplexity a word at each window."""
    labels = [label for label in LABELS if label in result]
    first = result["model"]["windows"][0]
    said = f"{', '.join(result['text'])}: {first['words']:,} words, {first['tokens']:,} tokens. "
    table = Table(title="perplexity a word", caption=said + result["protocol"])
    table.add_column("window", justify="right")
    for label in labels:
        table.add_column(result[label]["name"], justify="right")
    figures = [
        {row["window"]: row["word_perplexity"] for row in result[label]["windows"]}
        for label in labels
    ]
    for window in dict.fromkeys(window for rows in figures for window in rows):
        cells = [f"{rows[window]:.3f}" if window in rows else "-" for rows in figures]
        table.add_row(f"{window:,}", *cells)
    return table


def fidelity_table(result: dict[str, Any]) -> Table:
    """Closeness before and after the head, and of each FFN."""
    table = Table(title=f"{result['name']} beside {result['against']}, {result['tokens']:,} tokens")
    for column in ("", "cosine", "MSE", "MSE / dense mean square"):
        table.add_column(column, justify="left" if not column else "right")
    rows = [("before the LM head", result["before_head"]), ("after it", result["after_head"])]
    rows += [(f"FFN output, layer {each['layer']}", each) for each in result["ffn"]]
    for name, each in rows:
        table.add_row(
            name, f"{each['cosine']:.4f}", f"{each['mse']:.4g}", f"{each['relative_mse']:.4f}"
        )
    table.caption = (
        f"KL(dense || model) {result['kl']:.4f} nats a token, same most likely token for "
        f"{100 * result['top1_agreement']:.1f} %"
    )
    return table


def repetition_table(result: dict[str, Any]) -> Table:
    """How much of what each model writes repeats."""
    table = Table(title=f"continuations of {len(result['model']['prompts'])} prompts, per cent")
    columns = ("in loops", "end in a loop", "rep-2", "rep-3", "rep-4", "distinct-1", "distinct-2")
    keys = ("loop_share", "looping", "rep_2", "rep_3", "rep_4", "distinct_1", "distinct_2")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for way in ("greedy", "sampled"):
        for label in (label for label in LABELS if label in result):
            found = result[label][way]["repetition"]
            table.add_row(
                f"{result[label]['name']}, {way}", *(f"{100 * found[key]:.1f}" for key in keys)
            )
    return table


def samples_text(result: dict[str, Any]) -> str:
    """Some greedy continuations, model under model."""
    lines: list[str] = []
    for index, prompt in enumerate(result["model"]["prompts"][:_SHOWN]):
        lines.append(f"--- {prompt!r}")
        for label in (label for label in LABELS if label in result):
            lines.append(f"{result[label]['name']}: {result[label]['greedy']['texts'][index]!r}")
    return "\n".join(lines)
