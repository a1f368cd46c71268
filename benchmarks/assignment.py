"""Cost of the assignment of one layer in one alignment step, against the paper's recipe.

    python benchmarks/assignment.py    # ten minutes; writes results/assignment.json

Measures soft plan, its gradient and the rounding, for FFN widths of 7B to 32B models and affinities
as sharp as in training (`results/assignment_profile.json`), by these methods:

- `paper`: 50 unrolled log-domain sweeps, autograd through them, serial greedy selection;
- `POT`: `ot.bregman.sinkhorn_log` with as many sweeps, if POT is installed; rounding as in `paper`;
- `dotmoe`: starts from the potential of the step before, as in training; `dotmoe, cold`: from none.

Each method of a case runs in its own process, so that methods share neither denormals nor memory;
they take turns. One thread is pinned to one core.
"""

import ctypes
import math
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
import tyro
from torch import Tensor

from dotmoe.common.files import read_json
from dotmoe.measure.analyse.overhead import Clock
from dotmoe.measure.bench import forget_peak, peak_bytes
from dotmoe.method.transport import TransportPlan, balanced_plan, greedy_assignment
from rounds import in_turns, keep, medians, ratio_quartiles

EVERY_SHAPE = ("quickstart, ramp end", "quickstart, late")
"""Stages measured at every shape: the largest changes per step, and the sharpest plan."""
SHARP = "beyond training, sharp"
Steps = list[dict[str, float]]
REPEATS = {"paper": 1, "POT": 1, "dotmoe, cold": 3, "dotmoe": 5}
"""Number of steps in one turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What to measure."""

    shapes: tuple[tuple[int, int], ...] = (
        (18_944, 148),
        (11_008, 86),
        (14_336, 112),
        (27_648, 216),
    )
    """Neurons and experts of each layer; the first is measured at every stage of the profile."""
    profile: Path = Path("results/assignment_profile.json")
    """File with the distribution of affinities at a few steps of an alignment."""
    rounds: int = 3
    """Number of turns of every method."""
    core: int = 1
    """Core that the thread is pinned to."""
    out: Path = Path("results/assignment.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A layer whose neurons are assigned."""

    num_neurons: int
    num_experts: int
    stage: str
    """Name of a stage of the profile."""
    profile: dict[str, Any]
    """Content of the profile's file."""
    seed: int = 0


class Paper:
    """The paper's recipe, written without code of this package."""

    num_passes: int | None = None

    def plan(self, affinity_NE: Tensor, tau: float, num_sweeps: int = 50) -> Tensor:
        """Balanced soft plan by unrolled sweeps of alg:sinkhorn; autograd gives the gradient."""
        num_neurons, num_experts = affinity_NE.shape
        logits_NE = affinity_NE / tau
        log_capacity = math.log(num_neurons // num_experts)
        v_E = affinity_NE.new_full((num_experts,), log_capacity)
        for _ in range(num_sweeps):
            u_N1 = -torch.logsumexp(logits_NE + v_E, dim=1, keepdim=True)
            v_E = log_capacity - torch.logsumexp(logits_NE + u_N1, dim=0)
        return torch.exp(logits_NE + u_N1 + v_E)

    def rounded(self, plan_NE: Tensor) -> Tensor:
        """Serial greedy selection: all entries, largest first."""
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
    """POT's log-domain solver, with the paper's rounding because POT has none."""

    def plan(self, affinity_NE: Tensor, tau: float, num_sweeps: int = 50) -> Tensor:
        """Soft plan by as many sweeps as the paper's; autograd gives the gradient."""
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
        """Set the start of later solves to the potential of these affinities, as alignment does."""
        self.start_E = tau * self._solved(affinity_NE, tau).potential

    def plan(self, affinity_NE: Tensor, tau: float) -> Tensor:
        """Soft plan to the solver's default tolerance; the gradient is implicit."""
        solved = self._solved(affinity_NE, tau)
        self.num_passes = solved.num_passes
        return solved.plan

    def rounded(self, plan_NE: Tensor) -> Tensor:
        """Assignment equal to that of the serial selection."""
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


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    source = read_json(settings.profile)
    stages = source["stages"] | {SHARP: normal_profile(std=3.0, tau=0.1, change=5e-3)}
    rows = []
    for neurons, experts in settings.shapes:
        for stage in stages if (neurons, experts) == settings.shapes[0] else EVERY_SHAPE:
            case = Case(
                num_neurons=neurons, num_experts=experts, stage=stage, profile=stages[stage]
            )
            rounds = 1 if stage == SHARP else settings.rounds
            rows.append(measured(case, rounds, settings.core))
            print(f"{neurons:,} x {experts}, {stage}")
            for name, figures in rows[-1]["methods"].items():
                print(f"{name:>14}", {key: float(f"{x:.3g}") for key, x in figures.items()})
    profile = {"file": str(settings.profile), "provenance": source["provenance"]}
    keep(settings.out, {"profile": profile, "cases": rows})


def measured(case: Case, rounds: int, core: int) -> dict[str, Any]:
    """Results of all methods on one case; they take turns, each in a process of its own."""
    names = [name for name in METHODS if name != "POT" or find_spec("ot") is not None]
    peaks: dict[str, float] = {}
    turns: dict[str, Callable[[], Steps]] = {}
    with ExitStack() as stack:
        for name in names:
            pool = ProcessPoolExecutor(1, get_context("spawn"), prepare, (name, case, core))
            stack.enter_context(pool)
            # By then, memory freed earlier is returned to the system and must be allocated again.
            peaks[name] = pool.submit(steps_of, 1).result()[0]["peak_bytes"]
            turns[name] = partial(one_turn, pool, REPEATS[name])
        found = in_turns(turns, rounds)
    return described(case, rounds, found, peaks)


def described(
    case: Case, rounds: int, found: dict[str, list[Steps]], peaks: dict[str, float]
) -> dict[str, Any]:
    """Medians of every method, each also relative to the paper's recipe."""
    methods = {name: medians([s for turn in found[name] for s in turn]) for name in found}
    seconds = {name: [median(s["seconds"] for s in turn) for turn in found[name]] for name in found}
    for name, figures in methods.items():
        low, high = ratio_quartiles(seconds["paper"], seconds[name])
        figures |= {
            "peak_bytes": peaks[name],
            "times_faster": methods["paper"]["seconds"] / figures["seconds"],
            "times_faster_low": low,
            "times_faster_high": high,
            "share_of_peak": peaks[name] / peaks["paper"],
        }
    subject = {name: getattr(case, name) for name in ("num_neurons", "num_experts", "stage")}
    return subject | {"rounds": rounds, "methods": methods}


def one_turn(pool: ProcessPoolExecutor, repeats: int) -> Steps:
    return pool.submit(steps_of, repeats).result()


def prepare(name: str, case: Case, core: int) -> None:
    """Prepare this process for steps of one method."""
    global one_step
    os.sched_setaffinity(0, {core})
    torch.set_flush_denormal(True)
    torch.set_num_threads(1)
    one_step = ready(name, case)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # otherwise freed memory would hide the peak
        trim(0)


def ready(name: str, case: Case) -> Callable[[], dict[str, float]]:
    """A function that takes a step of a method."""
    method = METHODS[name]()
    # The first call loads code: use a small problem, and give the next call no start.
    small = torch.randn(2_048, 64), torch.ones(2_048, 64)
    step(method, *small, 0.5)
    affinity_NE = affinities(case.profile, case.num_neurons, case.num_experts, case.seed)
    if isinstance(method, Newton) and name == "dotmoe":
        method.remember(affinity_NE, case.profile["tau"])
    affinity_NE = one_step_later(case.profile, affinity_NE, case.seed)
    generator = torch.Generator().manual_seed(case.seed + 2)
    # As large as a gradient of the plan in training; the cost does not depend on it.
    gradient_NE = 1e-3 * torch.randn(affinity_NE.shape, generator=generator)
    return partial(step, method, affinity_NE, gradient_NE, case.profile["next_tau"])


def steps_of(repeats: int) -> Steps:
    """Results of steps of the method that this process was prepared for."""
    return [one_step() for _ in range(repeats)]


one_step: Callable[[], dict[str, float]]


def step(
    method: Paper | Newton, affinity_NE: Tensor, gradient_NE: Tensor, tau: float
) -> dict[str, float]:
    """Soft plan, its gradient, and the assignment, measured.

    Returns:
        Seconds; `peak_bytes`: peak memory above what was resident before; `marginal_error`: largest
        relative error of a row or column sum; for this package's solver also `passes` over A.
    """
    num_neurons, num_experts = affinity_NE.shape
    leaf_NE, device = affinity_NE.requires_grad_(), affinity_NE.device
    clock = Clock(device)
    forget_peak(device)
    before = peak_bytes(device)
    with clock.part("seconds"):
        with clock.part("forward_s"):
            plan_NE = method.plan(leaf_NE, tau)
        with clock.part("backward_s"):
            torch.autograd.grad(plan_NE, leaf_NE, gradient_NE)
        plan_NE = plan_NE.detach()
        with clock.part("rounding_s"):
            method.rounded(plan_NE)
    peak = peak_bytes(device) - before
    columns_E = plan_NE.sum(dim=0, dtype=torch.float64) * (num_experts / num_neurons)
    rows_N = plan_NE.sum(dim=1, dtype=torch.float64)
    found = {
        **clock.seconds(),
        "peak_bytes": peak,
        "marginal_error": float(torch.cat([columns_E, rows_N]).sub(1.0).abs().max()),
    }
    return found if method.num_passes is None else found | {"passes": method.num_passes}


def affinities(profile: dict[str, Any], num_neurons: int, num_experts: int, seed: int) -> Tensor:
    """Affinities drawn from a stage of the profile, [N, E].

    Row means, column means and the rest are independent: the first two are normal, the rest follows
    the profile's quantiles.
    """
    generator = torch.Generator().manual_seed(seed)
    quantiles = torch.tensor(profile["rest_quantiles"])
    place_NE = torch.rand(num_neurons, num_experts, generator=generator) * (len(quantiles) - 1)
    below_NE = place_NE.long().clamp_max(len(quantiles) - 2)
    rest_NE = torch.lerp(quantiles[below_NE], quantiles[below_NE + 1], place_NE - below_NE)
    row_N1: Tensor = profile["row_std"] * torch.randn(num_neurons, 1, generator=generator)
    column_E: Tensor = profile["column_std"] * torch.randn(num_experts, generator=generator)
    return rest_NE + row_N1 + column_E


def one_step_later(profile: dict[str, Any], affinity_NE: Tensor, seed: int) -> Tensor:
    """Affinities after an optimizer step of the measured size."""
    generator = torch.Generator().manual_seed(seed + 1)
    num_neurons, num_experts = affinity_NE.shape
    noise_NE = torch.randn(num_neurons, num_experts, generator=generator)
    column_E = torch.randn(num_experts, generator=generator)
    later_NE: Tensor = (
        affinity_NE * (1.0 + profile["change_growth"])
        + profile["change_rest_std"] * noise_NE
        + profile["change_column_std"] * column_E
    )
    return later_NE


def normal_profile(*, std: float, tau: float, change: float) -> dict[str, Any]:
    """An unmeasured profile: normal affinities and changes with given standard deviations."""
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


if __name__ == "__main__":
    main()
