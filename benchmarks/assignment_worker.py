"""One method in a process of its own, so that threads, denormals and memory are its alone."""

import ctypes
import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from assignment_affinities import affinities, one_step_later
from assignment_methods import METHODS, Method, Newton
from dotmoe.bench.process_memory import forget_peak, peak_bytes, resident_bytes


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


def step(method: Method, affinity_NE: torch.Tensor, gradient_NE: torch.Tensor, case: Case) -> Step:
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
    capacity = case.num_neurons // case.num_experts
    column_error = (plan_NE.sum(dim=0, dtype=torch.float64) / capacity - 1.0).abs().max()
    row_error = (plan_NE.sum(dim=1, dtype=torch.float64) - 1.0).abs().max()
    return Step(
        forward_s=solved - started,
        backward_s=differentiated - solved,
        rounding_s=rounded - differentiated,
        peak_bytes=peak,
        marginal_error=float(torch.maximum(column_error, row_error)),
        passes=method.num_passes if isinstance(method, Newton) else None,
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
