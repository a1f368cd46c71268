"""What a training stage logged at each step, as columns, and how the assignment settled."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

from dotmoe.analyse.run import AnalysedRun
from dotmoe.tables import figure

Columns = dict[str, list[Any]]


def values(run: AnalysedRun) -> dict[str, Any]:
    """`metric_columns` of the alignment, and `settling`."""
    assert run.aligned is not None  # `Analysis.lack` says otherwise
    columns = metric_columns(run.aligned.verified("align") / "metrics.jsonl")
    return columns | {"settling": settling(columns)}


def metric_columns(file: Path) -> Columns:
    """`metrics.jsonl` as one list a metric; `steps` are the numbers of the steps, from 1.

    A metric that some lines lack has None there. So does one that was not finite.
    """
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
    names = dict.fromkeys(name for line in lines for name in line if name != "step")
    columns = {name: [line.get(name) for line in lines] for name in names}
    return {"steps": [line["step"] for line in lines], **columns}


def settling(columns: Columns) -> dict[str, Any]:
    """How the assignment changed over a training, in a few figures; {} where it was not learned.

    Returns:
        `moved_most`, `moved_most_at`: largest share of neurons that changed their expert in one
        step, and the number of that step.
        `moved_first_tenth`, `moved_last_tenth`: mean of that share over the first and the last
        tenth of the steps. `moved_last`: at the last step.
        `moves_per_neuron`: changes of expert a neuron, over all steps.
        `soft_hard_gap_first`, `soft_hard_gap_last`: the gap (see `Learned.soft_hard_gap`) at the
        first and the last step; None where the run did not log it.
    """
    moved = columns.get("moved_fraction")
    if not moved:
        return {}
    tenth = max(1, len(moved) // 10)
    gaps = columns.get("soft_hard_gap") or [None]
    return {
        "moved_most": max(moved),
        "moved_most_at": columns["steps"][moved.index(max(moved))],
        "moved_first_tenth": mean(moved[:tenth]),
        "moved_last_tenth": mean(moved[-tenth:]),
        "moved_last": moved[-1],
        "moves_per_neuron": sum(moved),
        "soft_hard_gap_first": gaps[0],
        "soft_hard_gap_last": gaps[-1],
    }


def says(values: dict[str, Any]) -> list[str]:
    """Losses at both ends, and how the assignment settled."""
    kl, ce, found = values["kl"], values["ce"], values["settling"]
    lines = [
        f"{len(values['steps'])} steps, kl {figure(kl[0], '.3f')} to {figure(kl[-1], '.3f')}, "
        f"ce {figure(ce[0], '.3f')} to {figure(ce[-1], '.3f')}"
    ]
    if found:
        lines.append(
            f"neurons that change their expert in a step: {100 * found['moved_most']:.2g} % at "
            f"most (step {found['moved_most_at']}), {100 * found['moved_last_tenth']:.2g} % in the "
            f"last tenth, {100 * found['moved_last']:.2g} % at the end; "
            f"{found['moves_per_neuron']:.1f} changes a neuron; soft/hard gap "
            f"{figure(found['soft_hard_gap_first'], '.3f')} to "
            f"{figure(found['soft_hard_gap_last'], '.3f')}"
        )
    return lines
