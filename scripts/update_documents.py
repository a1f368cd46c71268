"""Put numbers of JSON files into the documents.

    python scripts/update_documents.py            # rewrite
    python scripts/update_documents.py --check    # exit 1 if a document is not current

A comment in a document holds a template; what it gives follows, up to `<!-- end -->`:

    <!-- from results/vllm_parity.json: rows
    | export | dtype | mean difference, nats |
    | --- | --- | ---: |
    | {export} | {dtype} | {mean:.2g} |

    {made(record)}; {file}.
    -->

Behind `from` stand a file, or `-` for none, and after a colon the rows of the table: Python over
the keys of the file. The last line of the table is repeated for each row. Braces hold Python as in
an f-string, in that line over the keys of the row, elsewhere over those of the file. `row`, `rows`,
`record` (the file's content) and `file` are known everywhere, and so are the functions below. Keys
are attributes, too: `{perplexity.wiki:.2f}`. A missing value is shown as a dash.
"""

import builtins
import io
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
from rich.console import Console
from transformers import LlamaConfig, Qwen2Config

from dotmoe.cli.quickstart import shown_quickstart
from dotmoe.common.tables import in_bytes, in_time, percent
from dotmoe.export.parameters import count_parameters
from dotmoe.measure.config import InspectConfig
from dotmoe.measure.evaluate.difference import difference
from dotmoe.measure.inspection import inspect_model
from dotmoe.method.config import RepairConfig
from dotmoe.method.granularity import Granularity
from dotmoe.models.config import LoadConfig
from dotmoe.models.family import family_of, meta_model
from dotmoe.pipeline.rows import Row, over_seeds
from dotmoe.run.config import recipe_of

ROOT = Path(__file__).resolve().parents[1]
PART = re.compile(
    r"(?P<head><!-- from (?P<file>\S+?)(?:: (?P<rows>[^\n]*))?\n(?P<template>.*?)-->\n)"
    r".*?(?P<end><!-- end -->)",
    re.DOTALL,
)
FOR_WRITERS = (percent, in_time, in_bytes, difference, median)
"""Functions that documents call."""


class Nothing:
    """A value that a file does not have: false, each member of it is nothing, shown as a dash."""

    def __getattr__(self, name: str) -> "Nothing":
        return self

    def __getitem__(self, key: object) -> "Nothing":
        return self

    def __bool__(self) -> bool:
        return False

    def __format__(self, form: str) -> str:
        return "-"


class Record(dict[str, Any]):
    """A JSON object whose members are attributes, too; `Nothing` where there is no such member."""

    def __missing__(self, name: str) -> Nothing:
        return Nothing()

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Scope(Record):
    """Names of an expression; those of this script and of Python are known as well."""

    def __missing__(self, name: str) -> Nothing:
        if name in globals() or hasattr(builtins, name):
            raise KeyError(name)
        return Nothing()


def load(file: str | Path) -> Any:
    """Content of a JSON file, by its path in the repository; null is as if it were missing."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return json.loads(text, object_pairs_hook=lambda o: Record(p for p in o if p[1] is not None))


def value(expression: str, names: Mapping[str, Any]) -> Any:
    """Value of a Python expression over these names and the functions of this script."""
    return eval(expression, {**globals(), **names}, Scope(names))


def written(template: str, names: Mapping[str, Any]) -> str:
    """Text of a template; its braces hold Python over these names."""
    return str(value(f'f"""{template}"""', names))


def part(match: re.Match[str]) -> str:
    """A part of a document, made anew."""
    file, lines = match["file"], list[str]()
    record = Record() if file == "-" else load(file)
    known = {**record, "record": record, "file": file}
    if match["rows"]:
        known["rows"] = [Record(row) for row in value(match["rows"], known)]
    template = match["template"].splitlines()
    for before, line in zip(["", *template], template, strict=False):
        if before.startswith("| ---"):
            lines += table_rows(line, known)
        else:
            lines.append(line if line.startswith("|") else written(line, known))
    return "\n".join([match["head"].rstrip("\n"), *lines, match["end"]])


def table_rows(line: str, known: Mapping[str, Any]) -> list[str]:
    """Lines of a table; a column without any value is an error, most likely of its template."""
    shared = {name: known[name] for name in ("record", "file", "rows")}
    made = [written(line, {**row, **shared, "row": row}) for row in known["rows"]]
    columns = zip(*(each[2:-2].split(" | ") for each in [line, *made]), strict=False)
    if empty := [name for name, *cells in columns if {*cells} == {"-"}]:
        raise SystemExit(f"{known['file']}: no row has a value of {', '.join(empty)}.")
    return made


def rendered(text: str) -> str:
    """Text of a document with every part made anew."""
    return PART.sub(part, text)


def documents() -> list[Path]:
    """All documents that may have such parts; the overview of experiments reads the others."""
    others = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("experiments/**/*.md")]
    return [ROOT / "README.md", *sorted(others)]


def main() -> int:
    for document in documents():
        before = document.read_text(encoding="utf-8")
        after = rendered(before)
        if "--check" in sys.argv[1:] and after != before:
            print(f"{document} is not current. Run: python scripts/update_documents.py")
            return 1
        document.write_text(after, encoding="utf-8")
    return 0


# --- what documents call

SIMULATED = {"assignment": "align", "experts": "finetune", "repair": "repair"}
PARTS = {
    "the paper's recipe": "DOT-MoE (paper), aligned",
    "our start, weights as they are": "dotmoe, frozen",
    "repaired": "dotmoe, repaired by the refit alone",
    "repaired, then finetuned": "dotmoe, repaired and finetuned",
}
"""Rows of the paper's recipe and of dotmoe, which the file names otherwise."""
MODELS = ("LLaMA-2-7B", "LLaMA-3-8B", "Qwen2.5-7B")  # of the paper; one machine aligns each
PAPER_TOKENS = 3_500 * 64 * 2_048
"""Tokens of the paper's alignment."""


def made(record: Any) -> str:
    """Commit, hardware and versions of a measurement."""
    by = record.provenance
    commit = f"commit `{by.commit}`" if by.commit else "a commit that was not recorded"
    threads = f"{by.threads} thread{'s' * (by.threads != 1)}, " if by.threads else ""
    return f"Measured at {commit} on {by.hardware}, {threads}torch {by.versions.torch}"


def times(above: float, stderr: float) -> str:
    """Perplexity times dense with its standard error, of nats above the dense model's."""
    return f"{math.exp(above):.2f} ± {math.exp(above) * stderr:.2f}"


def compared(rows: Iterable[Any]) -> list[Any]:
    """Rows of a comparison, seeds merged, least loss first. Each has its method's `name`, the
    `dense` row, its perplexity `times` dense and with seeds their `spread`, `other_times` on the
    other text, the tasks' `score`, and its `way`: `pruned`, or router and weights.
    """
    merged = over_seeds(map(Row.from_record, rows))
    dense, *rest = (Record(row.to_record() | {"losses": [*row.losses]}) for row in merged)
    for row in rest:
        row["name"], row["dense"] = row.value.replace("dot_moe", "dotmoe"), dense
        row["score"] = score(row.tasks)
        row["times"] = math.exp(row.loss_above_dense)
        row["other_times"] = row.other_loss and math.exp(row.other_loss - dense.other_loss)
        losses = [math.exp(each) for each in row.losses or ()]
        row["spread"] = f"{min(losses):.2f} to {max(losses):.2f}" if len(losses) > 1 else Nothing()
        row["way"] = f"{row.router.split(',')[0]}_{row.weights}" if row.router else "pruned"
        if row.router == "own, not exportable":
            row["way"] = "true_frozen"
    return sorted(rest, key=lambda row: row.loss_above_dense)


def beside(rows: Iterable[Any], key: str, column: str) -> list[Any]:
    """Rows with the same `key` as one row, with a member for each value of `column`."""
    found: dict[str, Any] = {}
    for row in rows:
        found.setdefault(row[key], Record({key: row[key]}))[row[column]] = row
    return list(found.values())


def by_method(rows: Iterable[Any]) -> list[Any]:
    """Conversions of a comparison, a row for each method with its ways; the best repaired first."""
    found = beside((row for row in compared(rows) if row.way != "pruned"), "name", "way")
    return sorted(found, key=lambda row: row.ridge_repaired.loss)


def by_task(rows: Iterable[Any]) -> list[Any]:
    """Dense and repaired scores of each task, with their standard errors."""
    dense, *repaired = (row for row in rows if row.tasks and "finetuned" not in str(row.training))
    return [
        Record(task=name, chance=task.chance, dense=score({name: task}))
        | dict(enumerate(score(row.tasks, [name]) for row in repaired))
        for name, task in dense.tasks.items()
    ]


def score(tasks: Any, names: Iterable[str] = ()) -> str | Nothing:
    """Mean accuracy in percent over all or some tasks, and its standard error."""
    if not tasks:
        return Nothing()
    counted = [tasks[name] for name in names or tasks]
    error = math.hypot(*(task.stderr for task in counted)) / len(counted)
    return f"{100 * fmean(task.value for task in counted):.1f} ± {100 * error:.1f}"


def above_chance(tasks: Any) -> list[str]:
    """Tasks on which a model is better than guessing by more than two standard errors."""
    return [n for n, task in tasks.items() if task.value - task.chance > 2 * task.stderr]


def points(changes: list[float]) -> str:
    """Mean change in percentage points, and its standard error."""
    return f"{100 * fmean(changes):+.1f} ± {100 * stdev(changes) / len(changes) ** 0.5:.1f}"


def shares(rows: Iterable[Any]) -> list[Any]:
    """A row for each share of the FFN of `real_model.py table`: perplexity of frozen, repaired and
    finetuned weights and decoding speed, relative to the dense model; tasks above chance there.
    """
    dense, *rest = rows
    found = {1.0: Record(share=1.0, score=score(dense.tasks, above_chance(dense.tasks)))}
    found[1.0] |= dict.fromkeys(("frozen", "repaired", "finetuned", "speed"), 1.0)
    for row in rest:
        one = found.setdefault(row.active_fraction, Record(share=row.active_fraction))
        kind = row.training if row.training in ("frozen", "repaired") else "finetuned"
        one[kind] = row.perplexity.wiki / dense.perplexity.wiki
        if kind == "repaired":
            one["score"] = score(row.tasks, above_chance(dense.tasks))
            one["speed"] = row.decode_tokens_per_s / dense.decode_tokens_per_s
    return list(found.values())


def quickstart(record: Any) -> str:
    """Output of the quickstart."""
    console = Console(file=io.StringIO(), width=96)
    console.print(shown_quickstart(record), soft_wrap=True)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]


def paper_models() -> dict[str, Any]:
    """Configs of the paper's models."""
    sizes = (
        *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"),
        *("vocab_size", "intermediate_size", "max_position_embeddings"),
    )
    models: dict[str, tuple[Any, ...]] = {
        "LLaMA-2-7B": (LlamaConfig, 32, 4_096, 32, 32, 32_000, 11_008, 4_096),
        "LLaMA-3-8B": (LlamaConfig, 32, 4_096, 32, 8, 128_256, 14_336, 8_192),
        "Qwen2.5-7B": (Qwen2Config, 28, 3_584, 28, 4, 152_064, 18_944, 32_768),
        "Qwen2.5-32B": (Qwen2Config, 64, 5_120, 40, 8, 152_064, 27_648, 32_768),
    }
    return {
        model: family(**dict(zip(sizes, values, strict=True)), tie_word_embeddings=False)
        for model, (family, *values) in models.items()
    }


def inspected(model: str, recipe: str, **asked: Any) -> Any:
    """What `dotmoe inspect --gpu h100` estimates for a model of the paper, not measured."""
    start = recipe_of("convert", recipe)
    values = {field.name: getattr(start, field.name) for field in fields(start)}
    asked = values | {"model": model, "load": LoadConfig(device="cpu"), "gpu": "h100"} | asked
    return inspect_model(paper_models()[model], InspectConfig(**asked), stored=torch.bfloat16)


def planned() -> list[Any]:
    """Plans for the paper's models on its machine."""
    rows = []
    for model in MODELS:
        for plan in inspected(model, "paper", gpus=8, finetune_recipe="paper")["plans"]:
            rows.append({"model": model, **plan["recommended"], **plan})
    return rows


def on_one_gpu(model: str) -> list[Any]:
    """Memory, and hours of each stage, of conversions of a model on one H100."""
    rows = []
    for what, recipe, how in (
        ("dotmoe, `--repair-epochs 0`", "default", RepairConfig(repair_epochs=0)),
        ("dotmoe", "default", RepairConfig()),
        ("DOT-MoE (paper), a quarter active", "paper", RepairConfig()),
    ):
        stages = inspected(model, recipe, gpus=1, repairing=how)["conversions"][0]["stages"]
        row = {"what": what, "memory": max(stage["memory_total"] for stage in stages)}
        rows.append(row | {"took": {stage["stage"]: stage["hours"] for stage in stages}})
    return rows


def find(rows: Iterable[Any], **wanted: Any) -> Any:
    """The first row that has these values, compared as text; experiment.toml files call it."""
    return next(r for r in rows if all(str(r[n]) == str(v) for n, v in wanted.items()))


def shown(number: Any) -> str:
    """A number with three or four digits; any other value unchanged."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return f"{number}" if number else ""
    if isinstance(number, int) or abs(number) >= 100:
        return f"{number:,.0f}"
    return f"{number:.2f}" if abs(number) >= 10 else f"{number:.3f}"


def grid(rows: Any, show: Any = shown) -> str:
    """Named rows of named values as a table."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = [["", *columns], ["---", *["---:"] * len(columns)]]
    lines += [[name, *(show(row.get(c, "")) for c in columns)] for name, row in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def measured(record: Any) -> str:
    """Tables, findings and provenance of the result file of an experiment."""
    parts = []
    for table in record.tables:
        rows = {name: dict(row) for name, row in table["rows"].items()}
        for row, spreads in table.spreads.items():
            for column, ends in spreads.items():
                if ends[0] < ends[1]:
                    ends = " to ".join(map(shown, ends))
                    rows[row][column] = f"{shown(rows[row][column])} ({ends})"
        parts += [table.title] * bool(table.title) + [grid(rows)]
    if record.shows:
        lines = ["| finding | numbers, each to be below the next | here |", "| --- | --- | --- |"]
        for one in record.shows:
            numbers = " < ".join(map(shown, one.numbers))
            lines.append(f"| {one.text} | {numbers} | {said(one.verdict)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def said(verdict: str) -> str:
    """Verdict on a finding, in bold unless it is confirmed."""
    return verdict if verdict == "confirmed" else f"**{verdict}**"


def experiments() -> list[Any]:
    """Label, title and status of every experiment, and how many findings have which verdict; what
    it takes at the paper's scale, and the first sentence on how it differs here.
    """
    rows = []
    for file in ROOT.glob("experiments/*/README.md"):
        text, name = file.read_text(encoding="utf-8"), file.parent.name
        label, title = re.findall(r"\A# `(.+?)`: (.+)", text)[0]
        (status,) = re.findall(r"^\*\*Status: (.+?)\*\*", text, re.MULTILINE)
        parts = dict(re.findall(r"^## (.+)\n\n((?:(?!^## ).*\n)+)", text, re.MULTILINE))
        full = parts["At the paper's scale"]
        commands = re.findall(r"^(?:dotmoe|python|torchrun) .*?(?= {2}|$)", full, re.MULTILINE)
        runs = re.findall(r"(\d+) (align|finetun)\w+\s+of\s+([\w.-]+\w)", full)
        here = re.findall(r"(.+?)(?:\.\s|[:;]\s| \(|$)", parts["Scaled down"], re.DOTALL)
        shows = [
            (one.text, said(one.verdict).strip("*"))
            for result in re.findall(r"from (results/experiments/\S+?\.json)", text)
            for one in load(result).shows
        ]
        counts = Counter(verdict for _, verdict in shows)
        found = ", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items()))
        row = {"label": label, "title": title, "status": status, "name": name, "runs": runs}
        row["command"] = f"`{commands[0]}`" if commands else Nothing()
        row["differs"] = " ".join(here[0].split()).replace("](..", "](../../experiments")
        rows.append({**row, "found": found or Nothing(), "shows": shows})
    return sorted(rows, key=lambda row: row["label"])


def reproduction() -> list[Any]:
    """The paper's tables and figures among the experiments, with estimated hours on 8 H100."""
    took = {(plan["model"], plan["task"][:5]): plan["hours"] for plan in planned()}
    rows = [row for row in experiments() if ":" in row["label"]]
    for row in rows:
        each = [int(n) * took[model, task[:5]] for n, task, model in row["runs"]]
        row["hours"] = f"{sum(each):.1f}" if each else Nothing()
    return rows


def claims() -> list[Any]:
    """Every claim of the paper's experiments with its verdict; those without a result: not run."""
    return [
        {**row, "claim": claim, "verdict": verdict}
        for row in experiments()
        if not row["name"].startswith("quality")  # our own additions
        for claim, verdict in row["shows"] or [(row["title"], "not run")]
    ]


def trained() -> list[Any]:
    """Share of the paper's models that its alignment trains: A and W_r, experts of 128 neurons."""
    rows = []
    for model, config in paper_models().items():
        experts = config.intermediate_size // 128
        split = Granularity(num_experts=experts, expert_size=128, active_experts=experts // 4)
        total = count_parameters(meta_model(config), family_of(config), (split,)).dense_total
        learned = experts * (config.intermediate_size + config.hidden_size)
        rows.append({"model": model, "share": learned * config.num_hidden_layers / total})
    return rows


if __name__ == "__main__":
    sys.exit(main())
