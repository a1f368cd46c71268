"""What a training stage logged at each step, as columns, and how the assignment settled."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dotmoe.analyse.run import AnalysedRun
from dotmoe.config import RunConfig
from dotmoe.layout import ExpertLayout
from dotmoe.moe.assignment import AlignState, AssignmentConfig, hard_assignment, soft_plan
from dotmoe.tables import figure

Columns = dict[str, list[Any]]


def values(run: AnalysedRun) -> dict[str, Any]:
    """`metric_columns` of the alignment, `settling`, and `kept_from_start` where it was learned."""
    folder = run.aligned
    assert folder is not None
    columns = metric_columns(folder.verified("align") / "metrics.jsonl")
    config = folder.config(RunConfig)
    kept = None
    if config.align.learn_assignment and config.method == "dot_moe":
        start = folder.verified("calibrate") / "state.safetensors"
        layout = ExpertLayout.load(folder.verified("extract") / "layout.safetensors")
        kept = kept_from_start(
            AlignState.load(start, torch.device("cpu")).affinity_LNE,
            layout.expert_of_neuron_LN,
            config.assignment,
            layout.moe_layers,
        )
    return columns | {"settling": settling(columns), "kept_from_start": kept}


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


def says(values: dict[str, Any]) -> list[str]:
    """Losses at both ends, how the assignment settled, and what is left of the start."""
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
    if values["kept_from_start"]:
        kept = mean(values["kept_from_start"])
        lines.append(f"neurons still in the expert they started in: {100 * kept:.0f} %")
    return lines
