"""Cost of the assignment in one alignment step of one layer, against the paper's recipe.

    python benchmarks/assignment.py            # ten minutes; writes results/assignment.json
    python benchmarks/assignment.py --quick    # one shape, one round, no file

Soft plan, its gradient and the rounding, for the FFN widths of 7B to 32B models and the sharpness
that training reaches (`assignment_profile.py`), by

- `paper`: 50 unrolled log-domain sweeps, autograd through them, serial greedy selection;
- `POT`: `ot.bregman.sinkhorn_log` with as many sweeps, if it is installed; rounding as `paper`;
- `dotmoe`: from the potential of the step before, as in training; `dotmoe, cold`: from none.

Each method of a case has a process of its own, so that threads, denormals and memory are its
alone; they take turns. One thread is pinned to one core.
"""

import ctypes
import math
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import tyro
from torch import Tensor

from dotmoe.bench.runners import forget_peak, peak_bytes, resident_bytes
from dotmoe.files import read_json
from dotmoe.tables import Table, to_markdown
from dotmoe.transport import TransportPlan, balanced_plan, greedy_assignment
from rounds import keep, ratio_quartiles

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
class Settings:
    """What to measure."""

    out: str | None = None
    """File to write. Left out: results/assignment.json, and none with --quick."""
    profile: str = "results/assignment_profile.json"
    """What affinities look like, by `assignment_profile.py`."""
    rounds: int = 3
    """Turns of every method."""
    core: int = 1
    """Core that one thread is pinned to."""
    quick: bool = False
    """The smallest shape and one round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One layer to assign."""

    num_neurons: int
    num_experts: int
    stage: str
    """Name of the profile."""
    profile: dict[str, Any]
    """Of `assignment_profile.py`."""
    threads: int = 1
    flush_denormals: bool = True
    seed: int = 0

    @property
    def capacity(self) -> int:
        """Neurons of one expert."""
        return self.num_neurons // self.num_experts


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What the assignment of one alignment step cost."""

    forward_s: float
    backward_s: float
    rounding_s: float
    peak_bytes: int
    """Most memory above what was resident before the step."""
    marginal_error: float
    """Largest relative error of a row or column sum of the plan."""
    passes: int | None
    """Passes over the affinities; None: not this package's solver."""

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.forward_s + self.backward_s + self.rounding_s


class Paper:
    """The paper's recipe, written out without anything of this package."""

    num_passes: int | None = None

    def plan(self, affinity_NE: Tensor, tau: float, num_sweeps: int = 50) -> Tensor:
        """Balanced soft plan by unrolled sweeps of alg:sinkhorn; the gradient is autograd's."""
        num_neurons, num_experts = affinity_NE.shape
        logits_NE = affinity_NE / tau
        log_capacity = math.log(num_neurons // num_experts)
        v_E = torch.full((num_experts,), log_capacity, dtype=affinity_NE.dtype)
        for _ in range(num_sweeps):
            u_N1 = -torch.logsumexp(logits_NE + v_E, dim=1, keepdim=True)
            v_E = log_capacity - torch.logsumexp(logits_NE + u_N1, dim=0)
        return torch.exp(logits_NE + u_N1 + v_E)

    def rounded(self, plan_NE: Tensor) -> Tensor:
        """Serial greedy selection on the CPU: all entries, largest first."""
        num_neurons, num_experts = plan_NE.shape
        order = torch.argsort(plan_NE.flatten(), descending=True, stable=True).tolist()
        expert_of = [-1] * num_neurons
        room = [num_neurons // num_experts] * num_experts
        left = num_neurons
        for entry in order:
            neuron, expert = divmod(entry, num_experts)
            if expert_of[neuron] < 0 and room[expert]:
                expert_of[neuron] = expert
                room[expert] -= 1
                left -= 1
                if left == 0:
                    break
        return torch.tensor(expert_of)


class PythonOptimalTransport(Paper):
    """POT's log-domain solver; POT has no rounding, so the paper's."""

    def plan(self, affinity_NE: Tensor, tau: float, num_sweeps: int = 50) -> Tensor:
        """As many sweeps as the paper's; the gradient is autograd's."""
        import ot  # optional

        num_neurons, num_experts = affinity_NE.shape
        plan_NE: Tensor = ot.bregman.sinkhorn_log(
            affinity_NE.new_ones(num_neurons),
            affinity_NE.new_full((num_experts,), num_neurons / num_experts),
            -affinity_NE,
            reg=tau,
            numItermax=num_sweeps,
            stopThr=0.0,
            warn=False,
        )
        return plan_NE


class Newton:
    """This package: semi-dual Newton with implicit gradient, rounding by deferred acceptance."""

    def __init__(self) -> None:
        self.start_E: Tensor | None = None
        """Column potential of the step before, in units of affinity."""
        self.num_passes: int | None = None

    def remember(self, affinity_NE: Tensor, tau: float) -> None:
        """Start from the potential of these affinities from now on, as alignment does."""
        self.start_E = tau * self._solved(affinity_NE, tau).potential

    def plan(self, affinity_NE: Tensor, tau: float) -> Tensor:
        """To the solver's default tolerance; the gradient is implicit."""
        solved = self._solved(affinity_NE, tau)
        self.num_passes = solved.num_passes
        return solved.plan

    def rounded(self, plan_NE: Tensor) -> Tensor:
        """Equal to the serial selection."""
        return greedy_assignment(plan_NE, capacity=plan_NE.shape[0] // plan_NE.shape[1])

    def _solved(self, affinity_NE: Tensor, tau: float) -> TransportPlan:
        start_E = None if self.start_E is None else self.start_E / tau
        capacity = affinity_NE.shape[0] // affinity_NE.shape[1]
        return balanced_plan(affinity_NE, capacity=capacity, tau=tau, start=start_E)


METHODS: dict[str, type[Paper] | type[Newton]] = {
    "paper": Paper,
    "POT": PythonOptimalTransport,
    "dotmoe, cold": Newton,
    "dotmoe": Newton,
}
"""`dotmoe` starts from the potential of the step before."""


def main(settings: Settings) -> None:
    profile = read_json(Path(settings.profile))
    stages = dict(profile["stages"])
    stages[SHARP] = normal_profile(std=3.0, tau=0.1, change=5e-3)
    rows = []
    for case, methods, rounds in plan_of_work(stages, settings):
        rows.append(measured(case, methods, rounds, settings.core))
        print(to_markdown(cost_table(rows[-1:])))
    late, growth = EVERY_SHAPE[1], []
    for shape in () if settings.quick else GROWTH:
        case = case_of(stages, shape, late)
        growth.append(measured(case, ("dotmoe",), 3 * settings.rounds, settings.core))
    print(to_markdown(cost_table(rows)))
    print(to_markdown(growth_table(growth)))
    out = settings.out or (None if settings.quick else "results/assignment.json")
    if out is not None:
        source = {"file": settings.profile, "provenance": profile["provenance"]}
        keep(out, {"profile": source, "cases": rows, "growth": growth})


def case_of(stages: dict[str, Any], shape: tuple[int, int], stage: str) -> Case:
    return Case(num_neurons=shape[0], num_experts=shape[1], stage=stage, profile=stages[stage])


def plan_of_work(
    stages: dict[str, Any], settings: Settings
) -> Iterator[tuple[Case, tuple[str, ...], int]]:
    """Cases, with the methods to compare on each and their rounds."""
    everything = tuple(m for m in REPEATS if m != "POT" or find_spec("ot") is not None)
    without_pot = tuple(m for m in everything if m != "POT")
    if settings.quick:
        yield case_of(stages, SHAPES[0], EVERY_SHAPE[1]), everything, 1
        return
    for stage in stages:
        rounds = 1 if stage == SHARP else settings.rounds
        yield case_of(stages, MAIN_SHAPE, stage), everything, rounds
    for shape in SHAPES:
        if shape != MAIN_SHAPE:
            for stage in EVERY_SHAPE:
                yield case_of(stages, shape, stage), without_pot, settings.rounds
    for stage in EVERY_SHAPE:
        case = replace(case_of(stages, MAIN_SHAPE, stage), threads=2)
        yield case, without_pot, settings.rounds
    for stage in (EVERY_SHAPE[1], SHARP):
        case = replace(case_of(stages, MAIN_SHAPE, stage), flush_denormals=False)
        yield case, without_pot, 1


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
    seconds = {m: [median(s.seconds for s in one) for one in steps[m]] for m in ("paper", name)}
    low, high = ratio_quartiles(seconds["paper"], seconds[name])
    return {
        "times_faster": figures["paper"]["seconds"] / figures[name]["seconds"],
        "times_faster_low": low,
        "times_faster_high": high,
        "share_of_peak": figures[name]["peak_bytes"] / figures["paper"]["peak_bytes"],
    }


def serve(connection: Connection, method_name: str, case: Case, cores: set[int]) -> None:
    """Answer every number of repeats with as many steps, until None comes.

    The first answer is for its peak: memory that was freed before is given back to the system then,
    and paid for again.
    """
    os.sched_setaffinity(0, cores)
    # Threads of the pool inherit the mode of the thread that starts them: before any arithmetic.
    torch.set_flush_denormal(case.flush_denormals)
    torch.set_num_threads(case.threads)
    method = METHODS[method_name]()
    _warm_up(method_name)
    affinity_NE = affinities(case.profile, case.num_neurons, case.num_experts, case.seed)
    if isinstance(method, Newton) and method_name == "dotmoe":
        method.remember(affinity_NE, case.profile["tau"])
    affinity_NE = one_step_later(case.profile, affinity_NE, case.seed)
    generator = torch.Generator().manual_seed(case.seed + 2)
    # Of the size of a gradient of the plan in training; the cost does not depend on it.
    gradient_NE = 1e-3 * torch.randn(affinity_NE.shape, generator=generator)
    _give_memory_back()
    while (repeats := connection.recv()) is not None:
        connection.send([step(method, affinity_NE, gradient_NE, case) for _ in range(repeats)])


def step(method: Paper | Newton, affinity_NE: Tensor, gradient_NE: Tensor, case: Case) -> Step:
    """Soft plan, its gradient, and the assignment, measured."""
    leaf_NE = affinity_NE.requires_grad_()
    forget_peak()
    before = resident_bytes()
    started = time.perf_counter()
    plan_NE = method.plan(leaf_NE, case.profile["next_tau"])
    solved = time.perf_counter()
    torch.autograd.grad(plan_NE, leaf_NE, gradient_NE)
    differentiated = time.perf_counter()
    plan_NE = plan_NE.detach()
    method.rounded(plan_NE)
    rounded = time.perf_counter()
    peak = peak_bytes() - before
    column_error = (plan_NE.sum(dim=0, dtype=torch.float64) / case.capacity - 1.0).abs().max()
    row_error = (plan_NE.sum(dim=1, dtype=torch.float64) - 1.0).abs().max()
    return Step(
        forward_s=solved - started,
        backward_s=differentiated - solved,
        rounding_s=rounded - differentiated,
        peak_bytes=peak,
        marginal_error=float(torch.maximum(column_error, row_error)),
        passes=method.num_passes,
    )


def _warm_up(method_name: str) -> None:
    """Load what the first call loads, on a small problem."""
    method = METHODS[method_name]()
    affinity_NE = torch.randn(2_048, 64).requires_grad_()
    plan_NE = method.plan(affinity_NE, 0.5)
    torch.autograd.grad(plan_NE.sum(), affinity_NE)
    method.rounded(plan_NE.detach())


def _give_memory_back() -> None:
    """Return freed memory to the system where the C library can: it would hide the peak."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def affinities(profile: dict[str, Any], num_neurons: int, num_experts: int, seed: int) -> Tensor:
    """Affinities drawn from a stage of `assignment_profile.py`, [N, E].

    Row means, column means and the rest are independent: the first two normal, the rest by its
    quantiles.
    """
    generator = torch.Generator().manual_seed(seed)
    quantiles = torch.tensor(profile["rest_quantiles"])
    place_NE = torch.rand(num_neurons, num_experts, generator=generator) * (len(quantiles) - 1)
    below_NE = place_NE.long().clamp_max(len(quantiles) - 2)
    rest_NE = torch.lerp(quantiles[below_NE], quantiles[below_NE + 1], place_NE - below_NE)
    row_N1 = profile["row_std"] * torch.randn(num_neurons, 1, generator=generator)
    column_E = profile["column_std"] * torch.randn(num_experts, generator=generator)
    return rest_NE + row_N1 + column_E


def one_step_later(profile: dict[str, Any], affinity_NE: Tensor, seed: int) -> Tensor:
    """The same affinities after an optimizer step of the measured size."""
    generator = torch.Generator().manual_seed(seed + 1)
    num_neurons, num_experts = affinity_NE.shape
    noise_NE = torch.randn(num_neurons, num_experts, generator=generator)
    column_E = torch.randn(num_experts, generator=generator)
    return (
        affinity_NE * (1.0 + profile["change_growth"])
        + profile["change_rest_std"] * noise_NE
        + profile["change_column_std"] * column_E
    )


def normal_profile(*, std: float, tau: float, change: float) -> dict[str, Any]:
    """A profile that was not measured: normal affinities, and changes, of given deviations."""
    levels = torch.linspace(0, 1, 1025, dtype=torch.float64).clamp(1e-5, 1 - 1e-5)
    return {
        "tau": tau,
        "next_tau": tau,
        "rest_quantiles": (std * torch.special.ndtri(levels)).tolist(),
        "row_std": 0.0,
        "column_std": 0.0,
        "change_growth": 0.0,
        "change_column_std": 0.0,
        "change_rest_std": change,
    }


PARTS = ("forward", "backward", "rounding")


def cost_table(cases: list[dict[str, Any]]) -> Table:
    """A row for each method of each case."""
    columns = ["N x E", "stage", "threads", "method", *(f"{part} ms" for part in PARTS)]
    columns += ["step ms", "times faster", "marginal error", "peak MiB", "of paper's"]
    rows = []
    for case in cases:
        for name, figures in case["methods"].items():
            is_compared = "times_faster" in figures
            rows.append(
                [
                    f"{case['num_neurons']:,} x {case['num_experts']}",
                    case["stage"] + ("" if case["flush_denormals"] else ", denormals kept"),
                    str(case["threads"]),
                    name,
                    *(milliseconds(figures[f"{part}_s"]) for part in PARTS),
                    milliseconds(figures["seconds"]),
                    f"{figures['times_faster']:.1f}" if is_compared else None,
                    f"{figures['marginal_error']:.1e}",
                    f"{figures['peak_bytes'] / 2**20:,.0f}",
                    f"{figures['share_of_peak']:.3f}" if is_compared else None,
                ]
            )
    return Table(columns=columns, rows=rows, words=4)


def growth_table(cases: list[dict[str, Any]]) -> Table:
    """Time of a step by size, and by entry of the plan."""
    columns = ["N", "E", "N x E", "step ms", "ns an entry", "passes", "peak bytes an entry"]
    rows = []
    for case in sorted(cases, key=lambda c: (c["num_neurons"] == 16_384, c["num_experts"])):
        figures = case["methods"]["dotmoe"]
        entries = case["num_neurons"] * case["num_experts"]
        rows.append(
            [
                f"{case['num_neurons']:,}",
                str(case["num_experts"]),
                f"{entries:,}",
                milliseconds(figures["seconds"]),
                f"{1e9 * figures['seconds'] / entries:.1f}",
                str(figures["passes"]),
                f"{figures['peak_bytes'] / entries:.1f}",
            ]
        )
    return Table(columns=columns, rows=rows)


def milliseconds(seconds: float) -> str:
    """With three digits where there are that many."""
    return f"{1e3 * seconds:,.1f}" if seconds < 0.1 else f"{1e3 * seconds:,.0f}"


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
