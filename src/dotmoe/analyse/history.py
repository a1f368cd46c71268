"""What a training stage logged at each step, as columns; says how the assignment settled."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

from dotmoe.analyse.run import AnalysedRun
from dotmoe.tables import figure


def values(run: AnalysedRun) -> dict[str, Any]:
    """`metric_columns` of the alignment."""
    assert run.aligned is not None  # otherwise the analysis is left out
    return metric_columns(run.aligned.verified("align") / "metrics.jsonl")


def metric_columns(file: Path) -> dict[str, list[Any]]:
    """`metrics.jsonl` as one list a metric; `steps` are the numbers of the steps, from 1.

    A metric that some lines lack has None there. So does one that was not finite.
    """
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    names = dict.fromkeys(name for line in lines for name in line)
    columns = {name: [line.get(name) for line in lines] for name in names}
    return {"steps": columns.pop("step"), **columns}


def says(values: dict[str, Any]) -> list[str]:
    """Losses at both ends, and how the assignment settled where it was learned."""

    def ends(name: str) -> str:
        return " to ".join(figure(values[name][at], ".3f") for at in (0, -1))

    lines = [f"{len(values['steps'])} steps, kl {ends('kl')}, ce {ends('ce')}"]
    if moved := values.get("moved_fraction"):
        most, last_tenth = max(moved), mean(moved[-max(1, len(moved) // 10) :])
        lines.append(
            f"neurons that change their expert in a step: {100 * most:.2g} % at most (step "
            f"{values['steps'][moved.index(most)]}), {100 * last_tenth:.2g} % in the last tenth, "
            f"{100 * moved[-1]:.2g} % at the end; {sum(moved):.1f} changes a neuron; soft/hard gap "
            f"{ends('soft_hard_gap')}"
        )
    return lines
