"""What a training stage logged at each step, as columns, and how the assignment settled."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dotmoe.moe.assignment import AssignmentConfig, hard_assignment, soft_plan

Columns = dict[str, list[Any]]


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


@torch.no_grad()
def kept_from_start(
    start_LNE: Float[Tensor, "L N E"],
    expert_of_neuron_LN: Int[Tensor, "L N"],
    config: AssignmentConfig,
    layers: range,
) -> list[float]:
    """Share of the neurons of each split layer that end in the expert they started in.

    The start is what the initial affinities extract to: rounded at `tau_end`. Experts keep their
    numbers through the alignment, so nothing needs to be matched.
    """
    kept = []
    for layer in layers:
        plan = soft_plan(start_LNE[layer : layer + 1], config, tau=config.tau_end)
        same_N = hard_assignment(plan)[0] == expert_of_neuron_LN[layer].to(start_LNE.device)
        kept.append(float(same_N.double().mean()))
    return kept
