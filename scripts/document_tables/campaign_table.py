"""The tables of a campaign: what each row keeps of the dense model, and what it costs."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from dotmoe.common.tables import percent

Cell = Callable[[Any], str | None]
TEXTS = {"wiki": "WikiText-2", "books": "books", "python": "Python"}
TASKS = {"tasks": "six tasks, %", "humaneval": "HumanEval, %", "gsm8k": "GSM8K, %"}
GENERATED = ("humaneval", "gsm8k")
"""Tasks whose answers are written; multiple choice hides what writing loses."""
ANSWERS = {"alike": "KL, prompts as fitted", "others": "KL, other prompts"}

FRONT_PAGE = (
    *("refitted", "repaired", "static-refitted", "static-repaired"),
    *("cmoe-repaired", "sparsegpt-2-4"),
)
"""Rows on the front page, without their shares: what a conversion gives, and rivals beside it."""
_MOST_NAMES = 8
_SHORT_REPAIR = ("refitted", "static-refitted")
_WHOLE_REPAIR = ("repaired", "static-repaired")


def on_answers(row: Any) -> dict[str, str | None]:
    """What a row keeps of the dense model's answers, by the headings of the table."""
    answers = row["measures"].get("answers", {})
    cells: dict[str, str | None] = {}
    for kind, heading in ANSWERS.items():
        found = answers.get(kind)
        cells[heading] = found and with_error(found["kl"], found["kl_stderr"], ".3f")
    others = answers.get("others")
    if others:
        cells["same token, %"] = _in_percent(others["top1"], others.get("top1_stderr"), ".1f")
        cells["answers that end, %"] = _ends(others, others["answers"])
        cells["with penalty 1.1, %"] = _ends(others.get("with_penalty"), others["answers"])
    return cells


def on_texts(row: Any) -> dict[str, str | None]:
    """What a row keeps on texts and tasks, by the headings of the table."""
    measures = row["measures"]
    cells: dict[str, str | None] = {}
    for name, heading in TEXTS.items():
        cells[heading] = _times_dense(row, name)
    for name, heading in TASKS.items():
        cells[heading] = _score(measures.get(name))
    return cells


def cost(row: Any) -> dict[str, str | None]:
    """What a row costs, by the headings of the table."""
    measures = row["measures"]
    cost, speed = measures.get("cost"), measures.get("llama_cpp")
    cells = {
        "MB": f"{measures['size']['bytes'] / 1e6:,.0f}" if "size" in measures else None,
        "CPU hours": f"{cost['cpu_hours']:.2f}" if cost else None,
        "tokens": f"{cost['tokens']:,}" if cost else None,
        "tokens/s in llama.cpp": f"{speed['moe']['tokens_per_s']:.0f}" if speed else None,
        "times dense": f"{speed['speed_ratio']:.2f}" if speed else None,
    }
    for batch, rounds in measures.get("vllm", {}).get("tokens_per_s", {}).items():
        cells[f"vLLM, batch {batch}"] = f"{sorted(rounds)[len(rounds) // 2]:.0f}"
    return cells


def with_error(value: float, stderr: float | None, form: str) -> str:
    """A number and its standard error, if it has one."""
    return f"{value:{form}}" if stderr is None else f"{value:{form}} ± {stderr:{form}}"


def _in_percent(share: float, stderr: float | None, form: str) -> str:
    """A share and its standard error, if it has one."""
    return with_error(100 * share, None if stderr is None else 100 * stderr, form)


def _ends(found: Mapping[str, Any] | None, questions: int) -> str | None:
    """The share of so many questions that are answered to an end."""
    if found is None:
        return None
    share = found["ended"]
    return _in_percent(share, math.sqrt(share * (1 - share) / questions), ".0f")


def _times_dense(row: Any, text: str) -> str | None:
    """Perplexity of a text as a multiple of the dense model's; of that one the perplexity."""
    found = row["measures"].get(text)
    if row["name"] == "dense":
        return f"ppl {found['perplexity']:.2f}" if found else None
    apart = row["above_dense"].get(text)
    if apart is None:
        return None
    nats, stderr = apart["nats"]
    times = math.exp(nats)
    return with_error(times, None if stderr is None else times * stderr, ".2f")


def _score(found: Mapping[str, Any] | None) -> str | None:
    """A score in percent: the mean of several tasks, or that of one."""
    if found is None:
        return None
    mean = found["averages"].get("paper")
    if mean is None:
        (mean,) = (
            score
            for task in found["tasks"].values()
            for score in task["scores"]
            if score["is_main"]
        )
    error = mean["stderr"]
    return with_error(100 * mean["value"], None if error is None else 100 * error, ".1f")


def front_page(records: Mapping[str, Any], tabled: Callable[..., str]) -> str:
    """What rows of several campaigns keep, in one table; the dense model's scores stand beside.

    `records` are results by their files, to which the table links.
    """
    rows = [
        (record | {"file": file}, row)
        for file, record in records.items()
        for row in record["rows"]
        if row["is_made"] and _without_share(row) in FRONT_PAGE and not _gives_way(row, record)
    ]
    columns: dict[str, Cell] = {
        "model": lambda row: f"[{row[0]['model']['title']}]({row[0]['file']})",
        "FFN active": lambda row: _share(row[1]),
        "method": lambda row: row[1]["what"],
        "same token, %": lambda row: on_answers(row[1]).get("same token, %"),
        "KL": lambda row: on_answers(row[1])[ANSWERS["others"]],
        "WikiText-2": lambda row: on_texts(row[1])["WikiText-2"],
    }
    for name in GENERATED:
        if any(name in row["measures"] for _, row in rows):
            columns[TASKS[name]] = partial(_score_beside_dense, name)
    return tabled(rows, columns, words=3)


def _gives_way(row: Any, record: Any) -> bool:
    """Whether a row is left out for those of the other repair at its share.

    The rows beside each other have one repair: the whole one where dotmoe and static pruning both
    have it, else the short one.
    """
    made = {each["name"] for each in record["rows"] if each["is_made"]}
    share = f"{100 * row['share']:.0f}" if row["share"] else ""

    both_are_whole = {f"{name}-{share}" for name in _WHOLE_REPAIR} <= made
    if _without_share(row) in _SHORT_REPAIR:
        return both_are_whole
    if _without_share(row) in _WHOLE_REPAIR:
        return not both_are_whole and f"refitted-{share}" in made
    return False


def _share(row: Any) -> str | None:
    """The share of the FFN that is active, where a row has one."""
    return percent(row["share"]) if row["share"] else None


def _without_share(row: Any) -> str:
    """The name of a row without the share at its end."""
    name: str = row["name"]
    return name.removesuffix(f"-{100 * row['share']:.0f}") if row["share"] else name


def _score_beside_dense(task: str, found: tuple[Any, Any]) -> str | None:
    """A score in percent, and that of the dense model; of a record and one of its rows."""
    record, row = found
    score = _score(row["measures"].get(task))
    dense = next(each for each in record["rows"] if each["name"] == "dense")
    of_dense = _score(dense["measures"].get(task))
    if score is None or of_dense is None:
        return score
    return f"{score} of {of_dense.partition(' ')[0]}"


def tables(record: Any, tabled: Callable[..., str]) -> str:
    """The tables of a campaign as Markdown, made by `tabled`, and what was not measured."""
    rows = [row for row in record["rows"] if row["is_made"]]
    parts = [_table(rows, make, tabled) for make in (on_answers, on_texts, cost)]
    return "\n\n".join([*parts, not_measured(record)])


def _table(
    rows: Sequence[Any], make: Callable[[Any], dict[str, str | None]], tabled: Callable[..., str]
) -> str:
    """A table of the columns in which at least one row has a value."""
    cells = {row["name"]: make(row) for row in rows}
    headings = dict.fromkeys(name for row in cells.values() for name in row)
    columns: dict[str, Cell] = {
        "FFN active": _share,
        "row": lambda row: row["what"],
    }
    for heading in headings:
        if any(row.get(heading) for row in cells.values()):
            columns[heading] = lambda row, at=heading: cells[row["name"]].get(at)  # type: ignore[misc]
    return tabled(rows, columns, words=2)


def not_measured(record: Any) -> str:
    """Rows that are not made and measures that no row has, each with the reason."""
    said = []
    left_out = dict[str, list[Any]]()
    for row in record["rows"]:
        if not row["is_made"]:
            left_out.setdefault(row["why_not_made"], []).append(row)
    for reason, rows in left_out.items():
        hours = sum(row["expected_hours"] for row in rows)
        said.append(f"- rows, {reason}, {hours:.1f} h expected: {_names_of(rows)}")
    reasons = dict[str, list[str]]()
    for row in record["rows"]:
        if row["is_made"]:
            for measure, why in row["not_measured"].items():
                reasons.setdefault(f"{measure}: {why}", []).append(row["name"])
    for reason, without in reasons.items():
        of_rows = f"of {len(without)} rows" if len(without) > 3 else f"of {', '.join(without)}"
        said.append(f"- {reason} ({of_rows})")
    return "\n".join(["Not measured:", "", *said]) if said else "All rows and measures are there."


def _names_of(rows: Sequence[Any]) -> str:
    """Names of rows, or how many they are."""
    if len(rows) > _MOST_NAMES:
        return f"{len(rows)} of them, which `--plan` lists"
    return ", ".join(f"`{row['name']}`" for row in rows)
