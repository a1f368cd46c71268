"""The tables and generated paragraphs of the documents, one function each, by name.

A document names one: `<!-- table: smollm2 -->`. A word behind the name goes to the function:
`<!-- table: measured tab_lte_comparison -->`. `scripts/update_documents.py` writes them. A number
comes from a JSON file; keys are attributes, too (`row.perplexity.wiki`), and a missing value is
shown as a dash.
"""

import builtins
import io
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
from rich.console import Console
from transformers import LlamaConfig, Qwen2Config

import campaign_table
from dotmoe.cli.quickstart import shown_quickstart
from dotmoe.common.tables import in_about, in_bytes, in_time, percent
from dotmoe.export.parameters import count_parameters
from dotmoe.measure.config import InspectConfig
from dotmoe.measure.evaluate.difference import difference
from dotmoe.measure.inspection import inspect_model
from dotmoe.method.config import RepairConfig
from dotmoe.method.granularity import Granularity
from dotmoe.models.config import LoadConfig
from dotmoe.models.family import family_of
from dotmoe.models.meta_model import meta_model
from dotmoe.pipeline.rows import Row, over_seeds
from dotmoe.run.config import recipe_of

ROOT = Path(__file__).resolve().parents[1]
TABLES: dict[str, Callable[..., str]] = {}
"""Functions that give a part of a document, by the name that documents use."""
DEFAULTS_CHANGED = {
    "581076ba1b5c": ("repair", "an export keeps four fifths of what the training changed"),
    "c470c1e264c5": ("repair", "the repair refits nothing behind a training"),
    "04a9f55d031d": ("finetune", "finetuning trains the FFNs alone"),
    "ba42f648eb12": ("text", "a chat model is fitted to its own answers if no text is named"),
}
"""Commits that changed a default: of what, and how."""
HEADLINES = {
    "results/first_contact_avx2.json": ("repair", "text"),
    "results/gemma3_270m.json": ("repair", "text"),
    "results/smollm2_bare.json": ("repair", "text"),
    "results/quickstart.json": ("repair",),
    "results/decode_qwen25_coder_1.5b_75.json": ("repair",),
    "results/decode_qwen25_coder_1.5b_50.json": ("repair",),
    "results/decode_qwen25_coder_0.5b_75.json": ("repair",),
    "results/decode_qwen25_coder_0.5b_50.json": ("repair",),
    "results/decode_smollm2_75.json": ("repair",),
    "results/decode_smollm2_50.json": ("repair",),
    "results/campaign_smollm2.json": ("repair", "finetune", "text"),
    "results/campaign_qwen25_coder_0.5b.json": ("repair", "finetune", "text"),
    "results/campaign_qwen25_coder_1.5b.json": ("repair", "finetune", "text"),
}
"""Files of numbers on the front page and in the table of sizes, and the defaults of theirs."""
EARLIER = frozenset(
    {
        *("results/first_contact_avx2.json", "results/gemma3_270m.json"),
        "results/smollm2_bare.json",
    }
)
"""Those of an earlier version: a default of theirs has changed since. A test asks git."""
DECODING = {
    "qwen25_coder_1.5b": "Qwen2.5-Coder-1.5B",
    "qwen25_coder_0.5b": "Qwen2.5-Coder-0.5B",
    "smollm2": "SmolLM2-135M",
}
"""Models whose decoding speed was measured, by the names of their files."""
MARK = "†"
"""Stands beside each file of an earlier version."""


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
    """Names of an expression; those of this module and of Python are known as well."""

    def __missing__(self, name: str) -> Nothing:
        if name in globals() or hasattr(builtins, name):
            raise KeyError(name)
        return Nothing()


def load(file: str | Path) -> Any:
    """Content of a JSON file, by its path in the repository; null is as if it were missing."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return json.loads(text, object_pairs_hook=lambda o: Record(p for p in o if p[1] is not None))


def value(expression: str, names: Mapping[str, Any]) -> Any:
    """Value of a Python expression over these names and the functions of this module."""
    return eval(expression, {**globals(), **names}, Scope(names))


def part(make: Callable[..., str]) -> Callable[..., str]:
    """Register a function as the part of its name, hyphens for underscores."""
    TABLES[make.__name__.replace("_", "-")] = make
    return make


def tabled(rows: Iterable[Any], columns: Mapping[str, Callable[[Any], Any]], words: int = 1) -> str:
    """A Markdown table with a row for each of `rows`; the first `words` columns hold text.

    A column without any value is an error, most likely of its function.
    """
    lines = [[shown_cell(show(row)) for show in columns.values()] for row in rows]
    for name, *cells in zip(columns, *lines, strict=True):
        if {*cells} == {"-"}:
            raise SystemExit(f"No row has a value of {name}.")
    rules = ["---" if index < words else "---:" for index in range(len(columns))]
    table = "\n".join(f"| {' | '.join(line)} |" for line in [[*columns], rules, *lines])
    return table.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")  # a figure is one word


def shown_cell(value: Any) -> str:
    """Text of a cell; a dash for a missing value."""
    return "-" if value is None else f"{value}"


def sourced(text: str, file: str) -> str:
    """A cell of the front page as a link to its file, marked if that is of an earlier version."""
    return f"[{text}]({file}){f' {MARK}' if file in EARLIER else ''}"


SIMULATED = {"assignment": "align", "experts": "finetune", "repair": "repair"}
PARTS = {
    "the paper's recipe": "DOT-MoE (paper), aligned",
    "our start, weights as they are": "dotmoe, frozen",
    "repaired": "dotmoe, repaired by the refit alone",
    "repaired, then finetuned": "dotmoe, repaired and finetuned",
}
"""Rows of the paper's recipe and of dotmoe, which the file names otherwise."""
CAMPAIGNS = ("qwen25_coder_1.5b", "qwen25_coder_0.5b", "gemma3_270m", "smollm2")
"""Models of campaigns, the largest first."""
MODELS = ("LLaMA-2-7B", "LLaMA-3-8B", "Qwen2.5-7B")  # of the paper; one machine aligns each
PAPER_TOKENS = 3_500 * 64 * 2_048
"""Tokens of the paper's alignment."""


def made(record: Any) -> str:
    """Commit, hardware and versions of a measurement."""
    by = record.provenance
    commit = f"commit `{by.commit}`" if by.commit else "a commit that was not recorded"
    threads = ""
    if by.threads:
        threads = "1 thread, " if by.threads == 1 else f"{by.threads} threads, "
    return f"Measured at {commit} on {by.hardware}, {threads}torch {by.versions.torch}"


def times(above: float, stderr: float) -> str:
    """Perplexity times dense with its standard error, of nats above the dense model's."""
    return f"{math.exp(above):.2f} ± {math.exp(above) * stderr:.2f}"


def above_dense(result: Any, dense: Any) -> str:
    """Perplexity of a result times that of the dense model, with its standard error."""
    nats, stderr = difference(result, dense)
    assert stderr is not None, "files of results keep the losses of windows"
    return times(nats, stderr)


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


def findings(record: Any) -> str:
    """Tables and findings of the result file of an experiment."""
    parts = []
    for table in record.tables:
        rows = {name: dict(row) for name, row in table["rows"].items()}
        for row, spreads in table.spreads.items():
            for column, ends in spreads.items():
                if ends[0] < ends[1]:
                    ends = " to ".join(map(shown, ends))
                    rows[row][column] = f"{shown(rows[row][column])} ({ends})"
        if table.title:
            parts.append(table.title)
        parts.append(grid(rows))
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
            for result in re.findall(r"<!-- table: measured (\w+) -->", text)
            for one in load(f"results/experiments/{result}.json").shows
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


# --- parts that several documents have


@part
def quoted(name: str) -> str:
    """Rows of the paper's table, and what its numbers are."""
    record = load(f"experiments/{name}/quoted.json")
    parts = [grid(record.rows, str), record.note]
    return "\n\n".join(each for each in parts if each)


@part
def measured(name: str) -> str:
    """Tables and findings of an experiment, and where its result file is from."""
    file = f"results/experiments/{name}.json"
    record = load(file)
    by = record.provenance
    collected = (
        f"Collected at commit `{by.commit}` on {by.hardware}, torch {by.versions.torch}; {file}."
    )
    if record.runs:
        runs = ", ".join(f"`{run}`" for run in record.runs)
        collected += f" Runs: {runs} (`experiments/runs.toml`)."
    return f"{findings(record)}\n\n{collected}"


@part
def tutorial(step: str) -> str:
    """What a step of the tutorial printed."""
    return f"```text\n{load('results/tutorial.json').steps[step].output}\n```"


# --- README.md


def sizes() -> str:
    """What half of the FFN costs models of four sizes, and the speed where measured."""
    rows = [
        ("Qwen2.5-Coder 0.5B", *qwen_by_default(), _decoding("qwen25_coder_0.5b", 50)),
        ("Gemma 3 270M", *gemma_by_default(), None),
        ("SmolLM2 135M", *smollm2_by_default(), _decoding("smollm2", 50)),
        ("embedded 3M", *_embedded_by_default(), None),
    ]
    files = ["first_contact_avx2", "gemma3_270m", "smollm2_bare", "quickstart"]
    linked = [
        (sourced(name, f"results/{file}.json"), *rest)
        for (name, *rest), file in zip(rows, files, strict=True)
    ]
    columns = {
        "model": lambda row: row[0],
        "text like the fit's": lambda row: row[1],
        "WikiText-2": lambda row: row[2],
        "decoding": lambda row: row[3],
    }
    return tabled(linked, columns)


def qwen_by_default() -> tuple[str, str]:
    """Perplexity of Qwen2.5-Coder-0.5B on books and WikiText-2, times dense."""
    return _on_books_and_wiki(load("results/first_contact_avx2.json").rows[1].texts)


def smollm2_by_default() -> tuple[str, str]:
    """Perplexity of SmolLM2-135M on books and WikiText-2, times dense."""
    return _on_books_and_wiki(load("results/smollm2_bare.json").rows[0].texts)


def _on_books_and_wiki(texts: Any) -> tuple[str, str]:
    books, wiki = texts.heldout_books, texts.wiki
    return (
        times(books.nats_above_dense, books.stderr),
        times(wiki.nats_above_dense, wiki.stderr),
    )


def gemma_by_default() -> tuple[str, str]:
    """Perplexity of Gemma 3 270M on books and WikiText-2, times dense."""
    books, _, wiki = load("results/gemma3_270m.json").rows
    return (
        above_dense(books.repaired, books.dense),
        above_dense(wiki.repaired, wiki.dense),
    )


def _embedded_by_default() -> tuple[str, None]:
    record = load("results/quickstart.json")
    return above_dense(record.dotmoe, record.dense), None


def _decoding(model: str, percent_active: int) -> str:
    """Times as fast as dense that a conversion decodes, linked to its file."""
    file = f"results/decode_{model}_{percent_active}.json"
    return sourced(f"{load(file).points[0].speed_ratio:.2f}", file)


def _qwen_on_texts() -> list[Any]:
    """Rows of Qwen2.5-Coder-0.5B with perplexity on each text times dense; least loss first."""
    found = []
    for row in compared(load("results/qwen_rows.json").rows):
        if row.texts:
            on = {name: above_dense(row.texts[name], row.dense.texts[name]) for name in row.texts}
            method = f"{row.name}, {row.weights}" if row.weights else f"{row.name}, pruned"
            found.append(Record(row | on | {"method": method}))
    return found


@part
def first_conversion() -> str:
    """The table that the quickstart prints."""
    output = quickstart(load("results/quickstart.json"))
    return f"```text\n{output.partition('Perplexity')[0].strip(chr(10))}\n```"


@part
def papers_results() -> str:
    """What the paper reports for models of 7B and 8B parameters."""
    rows = load("experiments/tab_zero_shot_results/quoted.json").rows
    llama, qwen = (
        rows["LLaMA-3 8B, DOT-MoE (paper)"],
        rows["Qwen2.5 7B, DOT-MoE (paper), half active"],
    )
    return (
        f"The paper reports a mean of six tasks of {llama.mean} % for LLaMA-3-8B with "
        f"{llama.active} active parameters, and of {qwen.mean} % for Qwen2.5-7B with "
        f"{qwen.active} (quoted)."
    )


# --- docs/guides/hardware.md


@part
def one_gpu_by_stage() -> str:
    """Estimates for three models on one H100, by stage."""
    rows = [{"model": model, **row} for model in MODELS for row in on_one_gpu(model)]
    columns = {
        "model": lambda row: row["model"],
        "conversion": lambda row: row["what"],
        "GPU memory": lambda row: in_about(row["memory"]),
        "experts": lambda row: about(_experts_hours(row["took"])),
        "repair": lambda row: about(row["took"]["repair"]) if "repair" in row["took"] else None,
        "all": lambda row: about(sum(row["took"].values())),
    }
    return tabled(rows, columns, words=2)


def _experts_hours(took: Mapping[str, float]) -> float:
    return took.get("start from data", 0.0) + took.get("alignment", 0.0)


def about(hours: float) -> str:
    """An estimated duration in whole minutes or hours."""
    if hours < 1 / 60:
        return "under 1 min"
    return f"{60 * hours:.0f} min" if hours < 1.5 else f"{hours:.0f} h"


@part
def simulated_memory() -> str:
    """Simulated peaks of the project's own steps at full width."""
    rows = [row for row in load("results/simulated_memory.json").rows if row.simulated]

    def together(row: Any) -> str:
        recomputed = ", recomputed" if row.checkpointing else ""
        return f"{row.micro_batch_size} x {row.seq_len}{recomputed}"

    columns = {
        "model": lambda row: row.model,
        "task": lambda row: SIMULATED[row.train],
        "GPUs": lambda row: row.ranks,
        "sequences at once": together,
        "peak of a GPU": lambda row: in_bytes(row.simulated),
        "planned": lambda row: in_bytes(row.planned),
        "on the host, per GPU": lambda row: in_bytes(row.on_host) if row.on_host else "nothing",
    }
    return tabled(rows, columns, words=2)


@part
def papers_plans() -> str:
    """Estimates of the paper's recipes on its machine."""
    columns = {
        "model": lambda row: row["model"],
        "task": lambda row: row["task"],
        "weights": lambda row: row["way"],
        "sequences at once": lambda row: row["micro_batch_size"],
        "memory of a GPU": lambda row: in_about(row["memory_total"]),
        "tokens/s": lambda row: f"{row['tokens_per_s']:,.0f}",
        "hours": lambda row: f"{row['hours']:.1f}",
    }
    return tabled(planned(), columns, words=3)


@part
def planner_error() -> str:
    """How near the cost model is to the steps that it was fitted to."""
    record = load("results/planner_check.json")
    ratios, shapes = [row.ratio for row in record.rows], {row.name for row in record.rows}
    return (
        f"Predicted by measured time: {min(ratios):.2f} to {max(ratios):.2f}, over {len(ratios)} "
        f"alignment steps of {len(shapes)} shapes in float32 ([planner_check]"
        "(../../results/planner_check.json))."
    )


# --- docs/research/conversation.md


def as_quotation(text: str) -> str:
    """A text of several lines as a quotation."""
    return "\n".join(f"> {line}".rstrip() for line in text.strip().splitlines())


@part
def conversation(file: str) -> str:
    """Every word of a conversation, question by question."""
    record = load(file)
    parts = []
    for number, turn in enumerate(record.dense.turns):
        parts += [f"## {number + 1}. The user", turn.question]
        for side, name in (("dense", "The dense model"), ("converted", "The converted model")):
            said = record[side].turns[number]
            end = "" if said.ended else f" (cut at {record.new_tokens} tokens)"
            parts += [f"**{name}**{end}", as_quotation(said.answer)]
    return "\n\n".join([*parts, f"{made(record)}; {file}."])


# --- docs/tutorial.md


@part
def tutorial_times() -> str:
    """CPU time of each step of the tutorial."""
    record = load("results/tutorial.json")
    columns = {
        "step": lambda step: step.title,
        "CPU time": lambda step: in_time(step.cpu_s / 3600) if step.cpu_s else None,
    }
    return f"{tabled(record.steps.values(), columns)}\n\n{made(record)}; results/tutorial.json."


# --- docs/research and experiments


@part
def experiments_by_label() -> str:
    """Every experiment with its status and verdicts."""
    columns = {
        "label": lambda row: f"[`{row['label']}`]({row['name']}/README.md)",
        "what": lambda row: row["title"],
        "status": lambda row: row["status"],
        "verdicts at small scale": lambda row: f"{row['found']}",
    }
    return tabled(experiments(), columns, words=4)


@part
def reproduced() -> str:
    """The paper's tables and figures: first command, hours, what was run here."""
    columns = {
        "table or figure": _label_link,
        "first command": lambda row: f"{row['command']}",
        "hours": lambda row: f"{row['hours']}",
        "here": lambda row: row["differs"],
        "status": lambda row: row["status"],
        "verdicts": lambda row: f"{row['found']}",
    }
    return tabled(reproduction(), columns, words=2).replace(
        "---: | ---: | ---: | ---: |", "---: | --- | --- | --- |"
    )


def _label_link(row: Any) -> str:
    return f"[`{row['label']}`](../../experiments/{row['name']}/README.md)"


@part
def papers_claims() -> str:
    """Every claim of the paper's experiments with its verdict and command."""
    columns = {
        "label": _label_link,
        "claim": lambda row: row["claim"],
        "verdict": lambda row: row["verdict"],
        "command": lambda row: f"`make results/{row['name']}`",
    }
    return tabled(claims(), columns, words=4)


@part
def trained_share() -> str:
    """Share of the parameters that the paper's alignment trains."""
    columns = {"model": lambda row: row["model"], "trained": lambda row: f"{row['share']:.2%}"}
    return tabled(trained(), columns)


@part
def speed_of_granularities() -> str:
    """Decoding speed of a random model in vLLM on a CPU, by number of experts and batch."""
    file = "results/throughput_vllm.json"
    record = load(file)

    def speed(batch: str) -> Callable[[Any], str]:
        def cell(row: Any) -> str:
            moe, dense = median(row.moe.tokens_per_s[batch]), median(row.dense.tokens_per_s[batch])
            return f"{moe:,.0f} ({moe / dense:.2f})"

        return cell

    rows = [Record(row | {"experts": experts}) for experts, row in record.runs.items()]
    columns: dict[str, Callable[[Any], Any]] = {
        "experts": lambda row: row.experts,
        "active": lambda row: row.granularity.active_experts,
        **{name: speed(name.split()[-1]) for name in ("batch 1", "4", "16", "64")},
    }
    by = record.provenance
    version = record.runs["8"].moe.version
    said = f"vLLM {version}. Commit `{by.commit}` on {by.hardware}; {file}."
    return f"{tabled(rows, columns, words=0)}\n\n{said}"


# --- docs/research/results.md


def commits(record: Any) -> str:
    """Commit or commits of a result file, in code style."""
    made_at = record.made_at or record.provenance.commit.split(", ")
    return ", ".join(f"`{commit}`" for commit in made_at)


@part
def smollm2() -> str:
    """SmolLM2-135M at each share of its FFN: perplexity, tasks, tokens read."""
    file = "results/smollm2.json"
    record = load(file)
    dense = record.rows[0]

    def relative(row: Any, text: str) -> str | None:
        number = row.perplexity[text]
        return f"{number / dense.perplexity[text]:.2f}" if number else None

    columns = {
        "FFN active": lambda row: percent(row.active_fraction or 1),
        "weights": lambda row: row.training or "dense",
        "WikiText-2": lambda row: relative(row, "wiki"),
        "books": lambda row: relative(row, "books"),
        "six tasks, %": lambda row: f"{score(row.tasks)}",
    }
    return f"{tabled(record.rows, columns, words=2)}\n\nCommits {commits(record)}; {file}."


@part
def qwen_methods() -> str:
    """Qwen2.5-Coder-0.5B by method, share and training."""
    file = "results/qwen_rows.json"
    record, rows = load(file), _qwen_on_texts()
    columns = {
        "method": lambda row: row.method,
        "FFN active": lambda row: percent(row.active_fraction) if row.active_fraction else None,
        "WikiText-2": lambda row: row.wiki or None,
        "Python": lambda row: row.python or None,
        "books": lambda row: row.books or row.other_books,
    }
    return f"{tabled(rows, columns)}\n\nCommits {commits(record)}; {file}."


LEFT_OUT = ("by_energy", "expert_weaver", "lte")
"""Methods that have left the project, and one whose split and repair are another row's."""
NAMED = {
    "weight_clusters": "weight_clusters, lte",
    "disp_llm": "disp_llm \\*",
}


@part
def all_methods() -> str:
    """Every method on two models: conversions repaired alike, pruned models as they are."""
    small, large = (_by_name(f"results/{name}_rows.json") for name in ("embedded", "smollm2"))
    only_small = sorted({*small} - {*large}, key=lambda name: small[name].times)
    names = [*sorted(large, key=lambda name: large[name].times), *only_small]

    def on(rows: Mapping[str, Any], name: str, key: str) -> str | None:
        return f"{rows[name][key]:.2f}" if name in rows else None

    columns = {
        "method": lambda name: NAMED.get(name, name),
        "kind": lambda name: (
            "pruned" if (large.get(name) or small[name]).way == "pruned" else "split"
        ),
        "embedded, Python": lambda name: on(small, name, "times"),
        "SmolLM2, WikiText-2": lambda name: on(large, name, "times"),
        "SmolLM2, books": lambda name: on(large, name, "other_times"),
    }
    files = "results/embedded_rows.json, results/smollm2_rows.json"
    masks = "\\* Masks trained for 300 and 100 steps; about 10,000 are published."
    return f"{tabled(names, columns, words=2)}\n\n{masks} Commits in {files}."


def _by_name(file: str) -> dict[str, Any]:
    """Repaired conversions and pruned models of a comparison, by method."""
    rows = (row for row in compared(load(file).rows) if row.way in ("ridge_repaired", "pruned"))
    return {row.name: row for row in rows if row.name not in LEFT_OUT}


@part
def generated_answers() -> str:
    """Programs and sums that a dense model and its conversions solve."""
    programs = [row for row in load("results/qwen_generated.json").rows if row.tasks]
    sums = [row for row in load("results/qwen_tasks.json").rows if row.tasks and row.tasks.gsm8k]
    rows = [
        (row.model, row.training or "", label, questions, score(row.tasks, [task]))
        for found, task, label in (
            (programs, "humaneval_instruct", "HumanEval"),
            (sums, "gsm8k", "GSM8K"),
        )
        for row in found
        for questions in [row.tasks[task].questions or 32]
    ]
    columns = {
        "task": lambda row: row[2],
        "model": lambda row: f"{row[0]}, {row[1]}".rstrip(", "),
        "questions": lambda row: row[3],
        "solved, %": lambda row: row[4],
    }
    files = "results/qwen_generated.json, results/qwen_tasks.json"
    return f"{tabled(rows, columns, words=2)}\n\n{files}."


@part
def finetuned_steps() -> str:
    """SmolLM2-135M after 0 to 120 steps of the default finetuning."""
    file = "results/smollm2_finetuned.json"
    record = load(file)
    dense = record.rows[0].texts
    steps = {"repaired": 2, "30 steps": 3, "60 steps": 5, "120 steps": 6}

    def on(text: str) -> Callable[[str], str]:
        return lambda name: above_dense(record.rows[steps[name]].texts[text], dense[text])

    columns: dict[str, Callable[[Any], Any]] = {
        "finetuned": lambda name: name,
        "WikiText-2": on("wiki"),
        "books": on("other_books"),
        "Python": on("python"),
    }
    return f"{tabled(steps, columns)}\n\nCommits {commits(record)}; {file}."


@part
def papers_recipe() -> str:
    """SmolLM2-135M by the paper's recipe on few tokens, and by dotmoe."""
    file = "results/smollm2_parts.json"
    record = load(file)
    columns = {
        "row": lambda row: PARTS.get(row.name, row.name),
        "tokens": lambda row: f"{row.text_tokens:,}",
        "of the paper's": lambda row: f"1/{PAPER_TOKENS / row.text_tokens:,.0f}",
        "WikiText-2": lambda row: f"{math.exp(row.nats_above_dense):.2f}",
    }
    rows = [row for row in record.rows if row.name in PARTS]
    return f"{tabled(rows, columns)}\n\nCommits {commits(record)}; {file}."


@part
def decomposition() -> str:
    """What grouping neurons costs, and what the router costs."""
    file = "results/smollm2_decomposition.json"
    record = load(file)
    columns = {
        "what runs": lambda item: item[0],
        "WikiText-2": lambda item: f"{math.exp(item[1].wiki.nats_above_dense):.2f}",
        "books": lambda item: f"{math.exp(item[1].books.nats_above_dense):.2f}",
    }
    return f"{tabled(record.rows.items(), columns)}\n\nCommit {commits(record)}; {file}."


@part
def decoding_speed() -> str:
    """Decoding speed of every model and share in llama.cpp."""
    found = [
        (title, share, load(f"results/decode_{model}_{share}.json"))
        for model, title in DECODING.items()
        for share in (75, 50)
    ]

    def quartiles(point: Any) -> str:
        low, high = point.speed_ratio_quartiles
        return f"{low:.2f} to {high:.2f}"

    columns = {
        "model": lambda row: row[0],
        "FFN active": lambda row: f"{row[1]} %",
        "routed experts": lambda row: "{active_experts} of {experts}".format(**row[2].moe.weights),
        "dense, tokens/s": lambda row: f"{row[2].points[0].dense.tokens_per_s:.0f}",
        "MoE, tokens/s": lambda row: f"{row[2].points[0].moe.tokens_per_s:.0f}",
        "ratio": lambda row: f"{row[2].points[0].speed_ratio:.2f}",
        "quartiles": lambda row: quartiles(row[2].points[0]),
    }
    return f"{tabled(found, columns)}\n\nresults/decode_*.json."


@part
def serving_speed() -> str:
    """Speed of a random model relative to dense, by runtime and batch, with the ideal ratio."""
    file = "results/serving_speed.json"
    cases = {name: case for name, case in load(file).cases.items() if name.endswith(" 8")}

    def at(point: str) -> Callable[[Any], str]:
        def cell(item: Any) -> str:
            found = {each.point.name + str(each.point.batch): each for each in item[1].points}
            return f"{found[point].speed_ratio:.2f} ({found[point].ideal_ratio:.2f})"

        return cell

    columns: dict[str, Callable[[Any], Any]] = {
        "runtime and type": lambda item: item[0].split(",")[0],
        "prefill": at("prefill1"),
        "one sequence": at("decode1"),
        "4": at("decode4"),
        "16": at("decode16"),
    }
    return f"{tabled(cases.items(), columns)}\n\n{file}."


@part
def vllm_parity() -> str:
    """Differences of vLLM and Transformers to Transformers in float32."""
    file = "results/vllm_parity.json"
    record = load(file)
    columns = {
        "export": lambda row: row.export,
        "float32": lambda row: f"{row.float32.mean_to_float32:.2g}",
        "bfloat16": lambda row: (
            f"{row.bfloat16.mean_to_float32:.2g} / {row.bfloat16.stock_mean_to_float32:.2g}"
        ),
        "top-1 equal, bfloat16": lambda row: f"{row.bfloat16.top1_equal:.1%}",
    }
    rows = beside(record.rows, "export", "dtype")
    return f"{tabled(rows, columns)}\n\nCommit {commits(record)}; {file}."


@part
def gguf_types() -> str:
    """SmolLM2-135M in the number types of GGUF, in llama.cpp."""
    file = "results/smollm2_gguf.json"
    record = load(file)
    named = (
        Record(row | {"kind": "dense" if row.model == "gguf_dense" else row.weights})
        for row in record.rows
    )
    columns = {
        "type": lambda row: row.type,
        "dense": lambda row: f"{row.dense.perplexity:.2f}",
        "repaired": lambda row: f"{row.repaired.perplexity:.2f}",
        "top-1 equal": lambda row: f"{row.repaired.top1_agreement:.0%}",
    }
    rows = beside(named, "type", "kind")
    return f"{tabled(rows, columns)}\n\nCommit {commits(record)}; {file}."


@part
def sizes_of_results() -> str:
    """The table of sizes, its links from the page of results."""
    return sizes().replace("](results/", "](../../results/")


@part
def qwen_kept() -> str:
    """How much of the dense model's accuracy on the tasks a finetuned conversion keeps."""
    file = "results/qwen_tasks.json"
    dense, *_, finetuned = load(file).rows
    six = [name for name in dense.tasks if name != "gsm8k"]
    above = above_chance({name: dense.tasks[name] for name in six})
    guess = fmean(dense.tasks[name].chance for name in above)

    def kept(names: list[str], guessed: float) -> str:
        mean = [fmean(row.tasks[name].value for name in names) for row in (finetuned, dense)]
        return f"{100 * (mean[0] - guessed) / (mean[1] - guessed):.0f} %"

    return (
        "The paper claims that 90 % of the dense mean of six tasks is kept. Here, finetuned, "
        f"{kept(six, 0)} of it is kept, but the dense model beats guessing on three tasks alone "
        f"({', '.join(above)}). Of their mean {kept(above, 0)} is kept, and {kept(above, guess)} "
        f"of what is above guessing. 100 questions each; {file}."
    )


@part
def kept() -> str:
    """What conversions of models that have a campaign keep, beside rivals."""
    return campaign_table.front_page(campaign_records(), tabled)


@part
def kept_of_results() -> str:
    """The same table, its links from the page of results."""
    return kept().replace("](results/", "](../../results/")


@part
def decoding() -> str:
    """How fast conversions decode in llama.cpp."""

    def of_all(share: int) -> str:
        *first, last = (_decoding(model, share) for model in DECODING)
        return f"{', '.join(first)} and {last}"

    *names, last_name = DECODING.values()
    return (
        "With half of the FFN (same conversions, fewer experts), one sequence in llama.cpp on a "
        f"CPU decodes {of_all(50)} times as "
        f"fast as dense ({', '.join(names)}, {last_name}; 8 bits). With three quarters it gains "
        f"nothing: {of_all(75)} times."
    )


def campaign_records() -> dict[str, Any]:
    """Results of the campaigns that were made by their files, of the largest model first."""
    files = [f"results/campaign_{name}.json" for name in CAMPAIGNS]
    return {
        file: json.loads((ROOT / file).read_text(encoding="utf-8"))
        for file in files
        if (ROOT / file).is_file()
    }


@part
def campaign(name: str) -> str:
    """Rows and measures of the campaign on a model, or the command that makes it."""
    file = f"results/campaign_{name}.json"
    if not (ROOT / file).is_file():
        return f"Not measured yet: `make campaign MODEL={name}`."
    record = json.loads((ROOT / file).read_text(encoding="utf-8"))
    by, commits_of_it = record["provenance"], ", ".join(f"`{each}`" for each in record["made_at"])
    source = f"Commit {commits_of_it}; {by['hardware']}, torch {by['versions']['torch']}; {file}."
    return f"{campaign_table.tables(record, tabled)}\n\n{source}"
