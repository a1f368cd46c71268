"""Cost of the assignment in one alignment step of one layer, against the paper's recipe.

    python benchmarks/assignment.py            # ten minutes; writes results/assignment.json
    python benchmarks/assignment.py --quick    # one shape, one repeat

Soft plan, its gradient and the rounding, for the FFN widths of 7B to 32B models and the sharpness
that training reaches (`assignment_profile.py`), by

- `paper`: 50 unrolled log-domain sweeps, autograd through them, serial greedy selection;
- `POT`: `ot.bregman.sinkhorn_log` with as many sweeps, if it is installed; rounding as `paper`;
- `dotmoe`: from the potential of the step before, as in training; `dotmoe, cold`: from none.

Every method of a case has a process of its own; they take turns, so that what else the machine does
falls on all of them. One thread is pinned to one core. Denormals are flushed unless a case says
otherwise.
"""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import tyro
from rich.console import Console

from assignment_affinities import normal_profile
from assignment_tables import cost_table, growth_table
from assignment_worker import Case, Step, serve
from dotmoe.bench.timing import ratio_quartiles
from dotmoe.run_folder import provenance, read_json, write_json

SHAPES = ((11_008, 86), (14_336, 112), (18_944, 148), (27_648, 216))
MAIN_SHAPE = (18_944, 148)
EVERY_SHAPE = ("quickstart, ramp end", "quickstart, late")
"""Stages measured at every shape: the largest changes a step, and the sharpest plan."""
SHARP = "beyond training, sharp"
GROWTH = ((4_096, 128), (8_192, 128), (16_384, 128), (32_768, 128))
GROWTH += ((16_384, 32), (16_384, 64), (16_384, 256))
REPEATS = {"paper": 1, "POT": 1, "dotmoe, cold": 3, "dotmoe": 5}
"""Steps in one turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AssignmentBenchConfig:
    """What to measure."""

    out: str = "results/assignment.json"
    """File to write."""
    profile: str = "results/assignment_profile.json"
    """What affinities look like, by `assignment_profile.py`."""
    rounds: int = 3
    """Turns of every method."""
    core: int = 1
    """Core that one thread is pinned to."""
    quick: bool = False
    """The smallest shape, one round, no file unless `out` is given."""


def main(config: AssignmentBenchConfig) -> None:
    console = Console(width=170)
    profile = read_json(Path(config.profile))
    stages = dict(profile["stages"])
    stages[SHARP] = normal_profile(std=3.0, tau=0.1, change=5e-3)
    rows = []
    for case, methods, rounds in plan_of_work(stages, config):
        rows.append(measured(case, methods, rounds, config.core))
        console.print(cost_table(rows[-1:]))
    growth = []
    for shape in () if config.quick else GROWTH:
        case = Case(
            num_neurons=shape[0],
            num_experts=shape[1],
            stage=EVERY_SHAPE[1],
            profile=stages[EVERY_SHAPE[1]],
        )
        growth.append(measured(case, ("dotmoe",), 3 * config.rounds, config.core))
    console.print(cost_table(rows))
    console.print(growth_table(growth))
    if config.quick and config.out == AssignmentBenchConfig().out:
        return
    write_json(
        Path(config.out),
        {
            "origin": "measured",
            "profile": {"file": config.profile, "provenance": profile["provenance"]},
            "cases": rows,
            "growth": growth,
            "provenance": provenance(seed=0),
        },
    )


def plan_of_work(
    stages: dict[str, Any], config: AssignmentBenchConfig
) -> Iterator[tuple[Case, tuple[str, ...], int]]:
    """Cases, with the methods to compare on each and their rounds."""
    everything = tuple(m for m in REPEATS if m != "POT" or find_spec("ot") is not None)
    without_pot = tuple(m for m in everything if m != "POT")

    def case(shape: tuple[int, int], stage: str, **changes: Any) -> Case:
        num_neurons, num_experts = shape
        return Case(
            num_neurons=num_neurons,
            num_experts=num_experts,
            stage=stage,
            profile=stages[stage],
            **changes,
        )

    if config.quick:
        yield case(SHAPES[0], EVERY_SHAPE[1]), everything, 1
        return
    for stage in stages:
        yield case(MAIN_SHAPE, stage), everything, 1 if stage == SHARP else config.rounds
    for shape in SHAPES:
        if shape != MAIN_SHAPE:
            for stage in EVERY_SHAPE:
                yield case(shape, stage), without_pot, config.rounds
    for stage in EVERY_SHAPE:
        yield case(MAIN_SHAPE, stage, threads=2), without_pot, config.rounds
    for stage in (EVERY_SHAPE[1], SHARP):
        yield case(MAIN_SHAPE, stage, flush_denormals=False), without_pot, 1


def measured(case: Case, methods: tuple[str, ...], rounds: int, core: int) -> dict[str, Any]:
    """All methods on one case, in turns."""
    cores = {core} if case.threads == 1 else os.sched_getaffinity(0)
    steps: dict[str, list[list[Step]]] = {method: [] for method in methods}
    peaks: dict[str, int] = {}
    with workers(case, methods, cores) as connections:
        for method, connection in connections.items():
            connection.send(1)
            peaks[method] = connection.recv()[0].peak_bytes
        for _ in range(rounds):
            for method, connection in connections.items():
                connection.send(REPEATS[method])
                steps[method].append(connection.recv())
    figures = {name: figures_of(steps[name], peaks[name]) for name in methods}
    for name in methods:
        if "paper" in methods and name != "paper":
            figures[name] |= against(figures, steps, name)
    description = {k: v for k, v in asdict(case).items() if k != "profile"}
    return description | {"rounds": rounds, "methods": figures}


@contextmanager
def workers(
    case: Case, methods: tuple[str, ...], cores: set[int]
) -> Iterator[dict[str, Connection]]:
    """A waiting process for each method; they end with the block."""
    context = multiprocessing.get_context("spawn")
    connections = {}
    processes = []
    for method in methods:
        connections[method], theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, method, case, cores), daemon=True)
        process.start()
        processes.append(process)
    try:
        yield connections
        for connection in connections.values():
            connection.send(None)
        for process in processes:
            process.join(timeout=60)
    finally:
        for process in processes:
            process.terminate()


def figures_of(rounds: list[list[Step]], peak: int) -> dict[str, Any]:
    """Medians over all steps of all rounds."""
    steps = [step for one in rounds for step in one]
    return {
        "forward_s": median(step.forward_s for step in steps),
        "backward_s": median(step.backward_s for step in steps),
        "rounding_s": median(step.rounding_s for step in steps),
        "seconds": median(step.seconds for step in steps),
        "fastest_s": min(step.seconds for step in steps),
        "steps": len(steps),
        "peak_bytes": peak,
        "marginal_error": max(step.marginal_error for step in steps),
        "passes": steps[0].passes,
    }


def against(
    figures: dict[str, Any], steps: dict[str, list[list[Step]]], name: str
) -> dict[str, float]:
    """How a method compares with the paper's recipe."""
    seconds = {m: [[s.seconds for s in one] for one in steps[m]] for m in ("paper", name)}
    low, high = ratio_quartiles(seconds["paper"], seconds[name])
    return {
        "times_faster": figures["paper"]["seconds"] / figures[name]["seconds"],
        "times_faster_low": low,
        "times_faster_high": high,
        "share_of_peak": figures[name]["peak_bytes"] / figures["paper"]["peak_bytes"],
    }


if __name__ == "__main__":
    main(tyro.cli(AssignmentBenchConfig, description=__doc__))
