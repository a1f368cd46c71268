"""Tables of the paper's experiments: their findings, verdicts and commands."""

import re
from collections import Counter
from typing import Any

from document_tables.cells import grid, shown, tabled
from document_tables.paper_models import planned, trained
from document_tables.records import ROOT, Nothing, load
from document_tables.registry import part


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
