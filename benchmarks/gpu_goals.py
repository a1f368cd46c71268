"""The goals of `make gpu-evidence` and the results in its files, as a table."""

from collections.abc import Callable, Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from dotmoe.files import read_json
from dotmoe.tables import Table, figure, table_of

PARTS = ("tests", "assignment", "alignment", "finetune", "serving", "real")
SHAPES = ((11_008, 86), (14_336, 112), (18_944, 148), (27_648, 216))
"""Neurons and experts of the FFNs of LLaMA-2-7B, LLaMA-3-8B, Qwen2.5-7B and Qwen2.5-32B."""
SHARES = {"1/8": 8, "1/4": 4, "1/2": 2}
"""Names of the shares k / E at which finetuning is measured, by E / k."""
EXPERTS = (8, 16, 74, 148)
ACTIVE = (0.5, 0.25)
STATES = ("frozen", "repaired", "finetuned")
KERNELS = {
    "masked activation, forward": ("masked activation", "forward"),
    "masked activation, gradient": ("masked activation", "backward"),
    "soft top-k": ("soft top-k", "forward"),
}
"""Each kernel: its point, and which of its times counts."""
Found = dict[str, dict[str, Any]]
"""Results of each point of a part, by name."""


def at(found: Found, *place: Any) -> Any:
    """The value at a path of keys."""
    return reduce(getitem, place, found)


class Goal(NamedTuple):
    """A number, `value(found, *of)`, and its limit."""

    part: str
    what: str
    rule: str
    """`most` or `least`."""
    limit: float
    of: tuple[Any, ...] = ()
    value: Callable[..., Any] = at


def goals() -> Iterator[Goal]:
    """Goals of every part, in order."""
    yield Goal("tests", "tests marked gpu that fail", "most", 0, value=failed)
    parity = ("tests", "export", "error_to_cpu")
    yield Goal("tests", "error of bfloat16 logits to that on the CPU", "most", 1.25, parity)
    for what, limit in {"plan": 1e-4, "gradient": 1e-3, "rounding": 0}.items():
        name = f"difference of the {what} to the CPU's"
        yield Goal("tests", name, "most", limit, ("tests", "solver", what))
    for name in map(named, SHAPES):
        faster = ("assignment", name, "methods", "dotmoe", "times_faster")
        yield Goal("assignment", f"{name}: times the paper's speed", "least", 5, faster)
    for name, of in KERNELS.items():
        yield Goal("assignment", f"{name}: share of a step saved", "least", 0.05, of, saved)
    step = ("alignment", "step", "summary")
    share = "assignment and straight-through, of a step"
    yield Goal("alignment", share, "most", 0.03, (*step, "method_share"))
    yield Goal("alignment", "bound, of a step", "least", 0.6, (*step, "share_of_lower_bound"))
    for what in ("time", "memory"):
        yield Goal("alignment", f"error of the planner's {what}", "most", 0.25, (what,), planner)
    for share in SHARES:
        for other in ("masked", "dense"):
            name = f"k/E {share}: time of sparse to {other}"
            yield Goal("finetune", name, "most", 1, (share, other), sparse_to)
    yield Goal("serving", "148 experts to 8: slowest decode", "least", 0.95, value=granularity)
    yield Goal("serving", "148 experts to dense: decode x 1", "least", 1, value=decode)
    for active in ACTIVE:
        for state in STATES:
            for text in ("books", "wikitext"):
                name = f"{active:.0%} active, {state}, {text}: nats above the paper's"
                yield Goal("real", name, "most", 0, (active, state, text), above)
        name = f"{active:.0%} active, finetuned: tasks above the paper's"
        yield Goal("real", name, "least", 0, (active,), better)


def failed(found: Found) -> float:
    """Number of tests that failed; it is no pass if no test ran."""
    tests = found["tests"]["pytest"]
    return len(tests["failed"]) if tests["passed"] else float("inf")


def named(shape: tuple[int, int]) -> str:
    """Name of the point of a layer."""
    return "{:,} x {}".format(*shape)


def saved(found: Found, point: str, part: str) -> float:
    """Share of an alignment step that a kernel saves over the better of eager and compiled."""
    taken = {k: v[part] for k, v in found["assignment"][point]["milliseconds"].items()}
    step = found["alignment"]["step"]
    calls = step["subject"]["shape"]["layers"] * step["subject"]["micro_batches"]
    gain = min(taken["eager"], taken["compiled"]) - taken["triton"]
    return float(1e-3 * gain * calls / step["summary"]["step_s"])


def planner(found: Found, what: str) -> float:
    """Largest relative error of the planner, without and with activation checkpointing."""
    planned = found["alignment"]["step"]["summary"]["planned"].values()
    return float(max(abs(each[f"{what}_ratio"] - 1) for each in planned))


def sparse_to(found: Found, share: str, other: str) -> float:
    """Time of a finetuning step with sparse FFNs, relative to another form of FFN."""
    rows = found["finetune"][share]["by_active_experts"]
    to_dense = {row["form"]: row["step_to_dense"] for row in rows} | {"dense": 1}
    return float(to_dense["sparse"] / to_dense[other])


def granularity(found: Found) -> float:
    """Decode speed with most experts over fewest, at the worst batch size (Observation 2)."""
    few, many = (decodes(found, experts) for experts in (EXPERTS[0], EXPERTS[-1]))
    pairs = zip(few, many, strict=True)
    return float(min(b["moe"]["tokens_per_s"] / a["moe"]["tokens_per_s"] for a, b in pairs))


def decode(found: Found) -> float:
    """Decode speed of one sequence, MoE over dense."""
    return float(decodes(found, EXPERTS[-1])[0]["speed_ratio"])


def decodes(found: Found, experts: int) -> list[dict[str, Any]]:
    """Decode points by batch size."""
    points = found["serving"][f"mixtral {experts}"]["points"]
    return [point for point in points if point["point"]["name"] == "decode"]


def above(found: Found, active: float, state: str, text: str) -> float:
    """Loss of our recipe minus that of the paper's."""
    ours, paper = (found["real"][f"{name} {active} {state}"] for name in ("default", "paper"))
    return float(ours["loss"][text] - paper["loss"][text])


def better(found: Found, active: float) -> float:
    """Mean accuracy of our recipe minus that of the paper's."""
    points = (f"{name} {active} finetuned, tasks" for name in ("default", "paper"))
    ours, paper = (fmean(found["real"][point]["accuracy"].values()) for point in points)
    return ours - paper


def found_in(folder: Path) -> Found:
    """Contents of the result files of a folder; a part without a file is empty."""
    found = {}
    for part in PARTS:
        file = folder / f"{part}.json"
        points = read_json(file)["points"] if file.exists() else {}
        found[part] = {name: point["found"] for name, point in points.items()}
    return found


def verdicts(folder: Path) -> list[dict[str, Any]]:
    """Every goal with its number and verdict; None and `not measured` where a point is missing."""
    found, rows = found_in(folder), []
    for goal in goals():
        try:
            value = float(goal.value(found, *goal.of))
            is_met = value <= goal.limit if goal.rule == "most" else value >= goal.limit
            verdict = "met" if is_met else "missed"
        except KeyError:
            value, verdict = None, "not measured"
        limit = f"at {goal.rule} {goal.limit:g}"
        rows.append(goal._asdict() | {"goal": limit, "measured": value, "verdict": verdict})
    return rows


def table(folder: Path) -> Table:
    """Table of goals, measured numbers and verdicts."""
    columns: dict[str, Callable[[dict[str, Any]], str | None]] = {
        "part": lambda row: row["part"],
        "what": lambda row: row["what"],
        "goal": lambda row: row["goal"],
        "measured": lambda row: figure(row["measured"], ".3g"),
        "verdict": lambda row: row["verdict"],
    }
    rows = verdicts(folder)
    return table_of(rows, columns, words=3, note=" ".join(sorted({made(folder, r) for r in rows})))


def made(folder: Path, row: dict[str, Any]) -> str:
    """Commit and hardware of a part's measurement; empty if it was not measured."""
    if row["measured"] is None:
        return ""
    record = read_json(folder / f"{row['part']}.json")
    by, how = record["provenance"], record["origin"].capitalize()
    return f"{how} at commit `{by['commit']}` on {by['hardware']}, torch {by['versions']['torch']}."
