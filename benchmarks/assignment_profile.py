"""What affinities look like while they are learned: the input of `assignment.py`.

    python benchmarks/assignment_profile.py      # minutes; writes results/assignment_profile.json

Aligns the embedded model by the quickstart's recipe, and with the paper's start, surrogate and
rate, and writes down at a few steps the distribution of the affinities and of what one optimizer
step adds to them. Both are reduced to figures that do not depend on the shape, so that affinities
of any size can be drawn that are as sharp, as skewed and as heavy-tailed.
"""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

import dotmoe
from dotmoe.align import Alignment
from dotmoe.data import TokenBlocks
from dotmoe.granularity import resolve
from dotmoe.load import load_dense
from dotmoe.moe.assignment import AlignState
from dotmoe.moe.masked import masked
from dotmoe.training.loop import train
from dotmoe.transport import balanced_plan
from rounds import keep

QUANTILES = 257
"""Quantiles kept of the affinities, equally spaced, extremes included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileConfig:
    """Which steps are looked at."""

    out: str = "results/assignment_profile.json"
    """File to write."""
    steps: int = 300
    """Alignment steps of the quickstart's recipe."""
    paper_steps: int = 120
    """Alignment steps with the paper's start, surrogate and rate."""
    seed: int = 0
    """Of initial values and data order."""


def main(config: ProfileConfig) -> None:
    quickstart = dotmoe.recipe("quickstart", out="-", seed=config.seed)
    ours = replace(quickstart, align=replace(quickstart.align, steps=config.steps))
    paper = replace(
        quickstart,
        calibrate=replace(quickstart.calibrate, start="random"),
        align=replace(
            quickstart.align,
            steps=config.paper_steps,
            surrogate="softmax",
            lr=5e-4,
            lr_router=5e-4,
        ),
    )
    stages = {}
    for name, run, shares in (
        ("quickstart", ours, {"start": 0.0, "warm-up": 0.1, "ramp end": 0.2, "late": 0.67}),
        ("paper", paper, {"ramp end": 0.25, "late": 0.67}),
    ):
        wanted = {round(share * run.align.steps): stage for stage, share in shares.items()}
        for step, found in profiles(run, sorted(wanted)).items():
            stages[f"{name}, {wanted[step]}"] = {"recipe": name, "step": step} | found
    keep(config.out, {"model": "embedded", "stages": stages}, config.seed)


def profiles(config: dotmoe.RunConfig, wanted: list[int]) -> dict[int, dict[str, Any]]:
    """Profile of the affinities at each wanted step of an alignment."""
    with tempfile.TemporaryDirectory() as scratch:
        untrained = replace(config, out=f"{scratch}/run", align=replace(config.align, steps=0))
        made = dotmoe.convert(untrained).folder
        dense = load_dense(config.model, config.load)
        text = TokenBlocks.load(made / "0_data/training.safetensors")
        initial = AlignState.load(made / "1_calibrate/state.safetensors", dense.device)
        schedule = config.align.schedule(text.num_blocks)
        task = Alignment(
            dense,
            text,
            initial,
            resolve(config.experts, dense.widths.ffn),
            config.align,
            config.assignment,
            warmup_steps=schedule.warmup_steps,
            seed=config.seed,
        )
        affinity_LNE = task.assignment.affinity_LNE
        seen = {0: affinity_LNE.detach().clone()}

        def remember(step: int, metrics: dict[str, float]) -> None:
            if step in wanted or step - 1 in wanted:
                seen[step] = affinity_LNE.detach().clone()

        with masked(dense, task.routing):
            train(task, schedule, Path(scratch), on_step=remember)
    tau = {step: config.assignment.tau(step, schedule.warmup_steps) for step in seen}
    return {step: profile(seen[step], seen[step + 1], tau[step], tau[step + 1]) for step in wanted}


def profile(affinity_LNE: Tensor, next_LNE: Tensor, tau: float, next_tau: float) -> dict[str, Any]:
    """Distribution of the affinities of one step, and of their change to the next.

    Affinities are split into a row mean, a column mean and the rest, the change into a multiple of
    the affinities, a column mean and the rest.
    """
    centred = affinity_LNE - affinity_LNE.mean(dim=(1, 2), keepdim=True)
    column = centred.mean(dim=1, keepdim=True)
    row = centred.mean(dim=2, keepdim=True)
    rest = (centred - column - row).double()
    levels = torch.linspace(0, 1, QUANTILES, dtype=torch.float64)
    quantiles = rest.flatten().sort().values[(levels * (rest.numel() - 1)).round().long()]
    change = next_LNE - affinity_LNE
    change = change - change.mean(dim=(1, 2), keepdim=True)
    growth = float((change * centred).sum() / centred.square().sum())
    change = change - growth * centred
    change_column = change.mean(dim=1, keepdim=True)
    capacity = affinity_LNE.shape[1] // affinity_LNE.shape[2]
    plan = balanced_plan(affinity_LNE, capacity=capacity, tau=tau).plan
    return {
        "tau": tau,
        "next_tau": next_tau,
        "std": float(affinity_LNE.std()),
        "logit_std": float(affinity_LNE.std()) / tau,
        "mean_largest_entry": float(plan.amax(dim=-1).mean()),
        "row_std": float(row.std()),
        "column_std": float(column.std()),
        "rest_quantiles": [round(value, 6) for value in quantiles.tolist()],
        "change_growth": growth,
        "change_column_std": float(change_column.std()),
        "change_rest_std": float((change - change_column).std()),
        "shape": list(affinity_LNE.shape),
    }


if __name__ == "__main__":
    main(tyro.cli(ProfileConfig, description=__doc__))
