"""Tables of docs/research/results.md."""

import math
from collections.abc import Callable, Mapping
from statistics import fmean, median
from typing import Any

from document_tables.cells import above_chance, above_dense, commits, score, tabled
from document_tables.comparisons import beside, compared
from document_tables.front_page import DECODING
from document_tables.paper_models import PAPER_TOKENS
from document_tables.records import Record, load
from document_tables.registry import part
from dotmoe.common.tables import percent

PARTS = {
    "the paper's recipe": "DOT-MoE (paper), aligned",
    "our start, weights as they are": "dotmoe, frozen",
    "repaired": "dotmoe, repaired by the refit alone",
    "repaired, then finetuned": "dotmoe, repaired and finetuned",
}
"""Rows of the paper's recipe and of dotmoe, which the file names otherwise."""


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
