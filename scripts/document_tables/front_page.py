"""Tables of the front page, and what they tell of earlier versions."""

import io
from typing import Any

from rich.console import Console

from document_tables.cells import above_dense, tabled, times
from document_tables.records import load
from document_tables.registry import part
from dotmoe.cli.quickstart import shown_quickstart

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


def sourced(text: str, file: str) -> str:
    """A cell of the front page as a link to its file, marked if that is of an earlier version."""
    return f"[{text}]({file}){f' {MARK}' if file in EARLIER else ''}"


def quickstart(record: Any) -> str:
    """Output of the quickstart."""
    console = Console(file=io.StringIO(), width=96)
    console.print(shown_quickstart(record), soft_wrap=True)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]


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


@part
def sizes_of_results() -> str:
    """The table of sizes, its links from the page of results."""
    return sizes().replace("](results/", "](../../results/")


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
