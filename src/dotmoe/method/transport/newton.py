"""Balanced plans by Newton's method on the semi-dual; its E x E system also gives the gradient."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from dotmoe.common.precision import in_float32
from dotmoe.method.transport.plan import (
    CACHED_ELEMENTS,
    Capacity,
    TransportPlan,
    checked_capacity,
    extremes_of,
)

STAGE_TOLERANCE = 0.25
"""Column error, in neurons, at which a stage above the final temperature ends. It is below 1, as a
nearly 0/1 plan that gives an expert one neuron too many is not solved."""
FIRST_FACTOR, SMALLEST_FACTOR, LARGEST_FACTOR = 4.0, 1.01, 1e3
"""Ratios of the temperatures of successive stages: the first, the smallest and the largest."""
LARGEST_MOVE = 4.0
"""Largest change of a log-potential in one Newton step; the quadratic model fails beyond it."""
MAX_PASSES = 300
"""Maximum number of passes over all N x E entries of a problem; a near start needs 2 to 4."""
STALE_PASSES = 8
"""A stage ends after this many passes in a row that do not reduce the best error by a third."""
ROUNDING_ERROR = 5e-6
"""Relative error of a column below which only rounding can prevent a smaller one."""
NARROW_LOGITS = 20.0
"""|A| / tau + |v| up to which exponentials can neither overflow nor make a whole row 0."""
WIDE_LOGITS = 512.0
"""|A| / tau + |v| above which float32 would round logits too much, so that float64 is used."""


def balanced_plan(
    affinity: Float[Tensor, "*L N E"],
    *,
    capacity: Capacity,
    tau: float,
    start: Float[Tensor, "*L E"] | None = None,
    tolerance: float = 1e-6,
) -> TransportPlan:
    """Soft balanced assignment of N neurons to E experts, solved to a stated accuracy.

    This is the plan of eq:entropic_ot that alg:sinkhorn would reach after enough sweeps. Row
    potentials are eliminated: M = softmax_e(A / tau + v), and v maximises the concave function

        F(v) = sum_e s_e v_e - sum_n logsumexp_e(A_ne / tau + v_e)

    Args:
        affinity: Score A of neuron n for expert e, larger is closer; float32 or float64. Leading
            indices: problems.
        capacity: Number of neurons of every expert (s), or one number per expert.
        tau: Temperature > 0, in units of affinity. Small is sharp.
        start: `potential` of a plan for nearby affinities: saves passes; a bad one does no harm.
        tolerance: The solver stops when no |column sum - s| / s is larger than this.

    Returns:
        The plan, whose gradient is implicit (see `_ImplicitPlan`); `marginal_error` exceeds
        `tolerance` only if rounding or `MAX_PASSES` stopped the solver. It is never NaN.

    Raises:
        ValueError: See `checked_capacity` and `extremes_of`.

    Example:
        >>> balanced_plan(torch.tensor([[9.0, 0], [9, 0]]), capacity=1, tau=1.0).entries
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
    """
    capacity_E = checked_capacity(affinity, capacity)
    *leading, num_neurons, num_experts = affinity.shape
    affinity_LNE = affinity.reshape(-1, num_neurons, num_experts)
    plan_LNE = torch.empty_like(affinity_LNE, memory_format=torch.contiguous_format).detach()
    # Vectors of E numbers stay on the host, which decides by them: each pass has one copy to it.
    potential_LE = torch.zeros(len(affinity_LNE), num_experts, dtype=torch.float64)
    if start is not None:
        potential_LE.copy_(start.detach().reshape(potential_LE.shape))
    error_L = torch.zeros_like(potential_LE[:, 0])
    num_passes = 0
    with torch.no_grad():
        for layer, extremes in enumerate(extremes_of(affinity_LNE)):
            affinity_NE, plan_NE = affinity_LNE.detach()[layer], plan_LNE[layer]
            problem = _SemiDual(affinity_NE, plan_NE, capacity_E, tau, extremes)
            potential_LE[layer], error_L[layer] = problem.solve(potential_LE[layer], tolerance)
            num_passes = max(num_passes, problem.num_passes)
    attached: Tensor = _ImplicitPlan.apply(  # type: ignore[no-untyped-call]
        affinity_LNE, plan_LNE, tau
    )
    return TransportPlan(
        entries=attached.reshape(affinity.shape),
        potential=potential_LE.reshape(*leading, num_experts).to(affinity.device),
        marginal_error=error_L.reshape(leading).to(affinity.device),
        num_passes=num_passes,
    )


@dataclass(frozen=True, slots=True)
class _Solved:
    """A potential that solves the problem at a temperature, and how it moves as that falls."""

    tau: float
    potential_E: Tensor
    drift_E: Tensor
    """Change of tau * v by tau, which is nearly constant."""

    def at(self, tau: float) -> Tensor:
        """The potential that is expected at another temperature."""
        ratio = self.tau / tau
        return self.potential_E * ratio + self.drift_E * (1.0 - ratio)

    def then(self, tau: float, potential_E: Tensor) -> "_Solved":
        """The same after the next stage, at a lower temperature."""
        drift_E = self.drift_E
        if bool(self.potential_E.any()):
            drift_E = (self.tau * self.potential_E - tau * potential_E) / (self.tau - tau)
        return _Solved(tau, potential_E, drift_E)


@dataclass(frozen=True, slots=True)
class _Line:
    """An accepted potential, the direction of the Newton step from it, and what is known there."""

    origin_E: Tensor
    direction_E: Tensor
    slope: float = 0.0
    """Slope of the dual along the direction."""
    norm: float = 0.0
    """Norm of the dual's gradient."""


class _SemiDual:
    """The semi-dual of one transport problem, and the plan from its last pass.

    Affinities and plan, N x E, are on their device, and vectors of E numbers on the host.
    """

    def __init__(
        self,
        affinity_NE: Tensor,
        plan_NE: Tensor,
        capacity_E: Tensor,
        tau: float,
        extremes: tuple[float, float],
    ) -> None:
        self.affinity_NE, self.plan_NE = affinity_NE, plan_NE
        self.capacity_E = capacity_E
        self.tau = tau
        low, high = extremes
        self.spread, self.widest = max(high - low, tau), max(abs(low), abs(high))
        tiny = torch.finfo(plan_NE.dtype).tiny
        num_experts = affinity_NE.shape[1]
        self.lowest_logit = 0.5 * math.log(tiny) + math.log(num_experts)
        """Lower bound of the logits. It keeps products of two entries of the plan from becoming
        denormal: CPU arithmetic on denormals is a hundred times slower."""
        self.factor_EE: Tensor | None = None
        """Cholesky factor of the Laplacian that the last Newton step used."""
        self.num_passes, self.formed_tau = 0, 0.0
        self.formed_E = self.potential_E = torch.zeros_like(capacity_E, dtype=torch.float64)
        """Potentials at the last computation of exponentials, and of the current plan."""

    def solve(self, start_E: Tensor, tolerance: float) -> tuple[Tensor, float]:
        """Write the plan to `plan_NE`; return its potential and relative error."""
        potential_E, error = self.newton(start_E, self.tau, tolerance)
        if error > max(tolerance, ROUNDING_ERROR):
            potential_E, error = self.cool(tolerance)
        if error > tolerance:
            gradient_E = self.gradient(potential_E, self.tau)
            error = float((gradient_E / self.capacity_E).abs().max())
        return potential_E, error

    def cool(self, tolerance: float) -> tuple[Tensor, float]:
        """Run Newton at falling temperatures, from one that v = 0 solves; tau * v carries over."""
        zero_E = torch.zeros_like(self.potential_E)
        solution = _Solved(self.spread * FIRST_FACTOR, zero_E, zero_E)
        factor = FIRST_FACTOR
        enough = STAGE_TOLERANCE / float(self.capacity_E.max())
        while True:
            tau = max(solution.tau / factor, self.tau)
            wanted = tolerance if tau == self.tau else enough
            before = self.num_passes
            potential_E, error = self.newton(solution.at(tau), tau, wanted)
            if tau == self.tau and error <= max(wanted, ROUNDING_ERROR):
                return potential_E, error
            if error <= wanted:
                solution = solution.then(tau, potential_E)
                bolder = factor**1.5 if self.num_passes - before <= 2 else factor
                factor = min(bolder, LARGEST_FACTOR)
            else:
                factor = math.sqrt(factor)
                if factor < SMALLEST_FACTOR or self.num_passes >= MAX_PASSES - 1:
                    return potential_E * (tau / self.tau), math.inf

    def newton(self, start_E: Tensor, tau: float, tolerance: float) -> tuple[Tensor, float]:
        """Run damped Newton at one temperature; return the best potential and its relative error.

        If the tolerance is reached, `plan_NE` is the plan of that potential.
        """
        best_E = start_E - start_E.mean()
        line = _Line(best_E, torch.zeros_like(best_E))
        step = 0.0
        best_error = math.inf
        stale = 0
        while stale < STALE_PASSES and self.num_passes < MAX_PASSES - 1:
            trial_E = line.origin_E + step * line.direction_E
            gradient_E = self.gradient(trial_E, tau)
            error = float((gradient_E / self.capacity_E).abs().max())
            stale = 0 if error < 0.67 * best_error else stale + 1
            if error < best_error:
                best_E, best_error = trial_E, error
            if error <= tolerance:
                break
            slope = float(gradient_E @ line.direction_E)
            norm = float(torch.linalg.vector_norm(gradient_E))
            # The dual is concave: if it still rises at the trial, its value there is higher.
            if slope >= 0 or norm < 0.9 * line.norm:
                # With the old matrix, a step gains as much as the step before it: two such steps
                # are cheaper than a new matrix.
                if error * norm**2 > 0.5 * tolerance * line.norm**2:
                    self.factor_EE = factored(self.plan_NE)
                line, step = self.line_from(trial_E, gradient_E, norm), 1.0
            else:  # go to where the slope, taken as linear, vanishes
                step *= min(max(line.slope / (line.slope - slope), 0.1), 0.7)
        return best_E, best_error

    def line_from(self, potential_E: Tensor, gradient_E: Tensor, norm: float) -> _Line:
        """The Newton step from a potential by the last matrix, shortened to `LARGEST_MOVE`."""
        assert self.factor_EE is not None
        move_E = solved(self.factor_EE, gradient_E)
        largest = float(move_E.abs().max())
        direction_E = move_E * (LARGEST_MOVE / max(LARGEST_MOVE, largest))
        return _Line(potential_E, direction_E, float(gradient_E @ direction_E), norm)

    def gradient(self, potential_E: Tensor, tau: float) -> Float[Tensor, " E"]:
        """Form the plan of a potential in one pass; return how far its columns fall short.

        This is where the host waits for the device, once.
        """
        self.num_passes += 1
        moved = float((potential_E - self.formed_E).abs().max())
        is_near = self.formed_tau == tau and moved <= 2 * LARGEST_MOVE
        # A small change only scales the columns, so the previous plan serves as the kernel.
        scale_E = (potential_E - self.potential_E).exp().to(self.plan_NE)
        if not is_near:
            self.formed_tau, self.formed_E = tau, potential_E
        self.potential_E = potential_E
        widest = self.widest / tau + float(potential_E.abs().max())
        sums_E = potential_E.new_zeros(potential_E.shape, device=self.plan_NE.device)
        for rows in row_blocks(self.plan_NE):
            plan = self.plan_NE[rows]
            if is_near:
                plan *= scale_E
            else:
                self._form(plan, self.affinity_NE[rows], widest)
            plan *= plan.sum(dim=-1, keepdim=True).reciprocal_()
            sums_E += plan.sum(dim=0)
        return self.capacity_E - sums_E.cpu()

    def _form(self, plan: Tensor, affinity: Tensor, widest: float) -> None:
        """Write exp(A / tau + v), times a constant per row, into a block of the plan."""
        dtype = torch.float64 if widest > WIDE_LOGITS else plan.dtype
        logits = plan if plan.dtype == dtype else plan.to(dtype)
        potential_E = self.formed_E.to(plan.device, dtype)
        torch.add(potential_E, affinity.to(dtype), alpha=1.0 / self.formed_tau, out=logits)
        if widest > NARROW_LOGITS:
            logits -= logits.amax(dim=-1, keepdim=True)
            logits.clamp_min_(self.lowest_logit)
        logits.exp_()
        if logits is not plan:
            plan.copy_(logits)


def row_blocks(plan_NE: Float[Tensor, "N E"]) -> list[slice]:
    """Consecutive blocks of rows of a plan, each small enough for several operations in cache.

    On the CPU a temporary as large as a plan costs more in page faults than the arithmetic on it.
    """
    num_neurons, num_experts = plan_NE.shape
    if plan_NE.device.type != "cpu":
        return [slice(0, num_neurons)]
    rows = max(1, CACHED_ELEMENTS * torch.get_num_threads() // num_experts)
    return [slice(first, first + rows) for first in range(0, num_neurons, rows)]


def factored(plan_NE: Float[Tensor, "N E"]) -> Float[Tensor, "E E"]:
    """Cholesky factor, on the host, of the negative Hessian of the semi-dual at a plan."""
    return factor_of(overlaps(plan_NE).cpu(), torch.finfo(plan_NE.dtype).eps)


@in_float32()  # with the three digits of bfloat16 Newton never converges
def overlaps(plan_NE: Float[Tensor, "N E"]) -> Float[Tensor, "E E"]:
    """M^T M of a plan, in float64."""
    return (plan_NE.mT @ plan_NE).double()


def factor_of(overlaps_EE: Float[Tensor, "E E"], rounding: float) -> Float[Tensor, "E E"]:
    """Cholesky factor of diag(M^T 1) - M^T M, given M^T M in float64.

    Rows of the plan sum to 1, so this is the Laplacian of the graph whose edge e-f weighs
    (M^T M)_ef: its diagonal is computed as the sum of the edges. Subtracting M^T M from diag(M^T 1)
    instead cancels every digit once the plan is nearly 0/1.

    Its kernel, the constant vectors, is pinned. Scaled by column sums, it is damped by the plan's
    rounding error, which is raised by factors of 100 until the matrix is positive definite.
    """
    sums_E = overlaps_EE.sum(dim=0)
    edges_EE = overlaps_EE.clone().fill_diagonal_(0.0)
    laplacian_EE = torch.diag(edges_EE.sum(dim=0)) - edges_EE
    root_E = sums_E.clamp_min(1e-3 * sums_E.mean()).sqrt()
    pin_E = torch.nn.functional.normalize(root_E, dim=0)
    matrix_EE = laplacian_EE / root_E / root_E.unsqueeze(-1) + torch.outer(pin_E, pin_E)
    damping = rounding
    while True:
        damped_EE = matrix_EE + damping * torch.eye(len(root_E))
        factor_EE, failed = torch.linalg.cholesky_ex(damped_EE)
        # The matrix has eigenvalues in [0, 2]: a damping of 10 dominates any rounding.
        if not bool(failed) or damping > 10:
            scaled_EE: Tensor = root_E.unsqueeze(-1) * factor_EE
            return scaled_EE
        damping *= 100.0


def solved(factor_EE: Float[Tensor, "E E"], right_E: Float[Tensor, " E"]) -> Float[Tensor, " E"]:
    """Solve Laplacian x = right for the x with mean zero; the mean of `right` is ignored."""
    centred_E1 = (right_E - right_E.mean()).unsqueeze(-1)
    solved_E = torch.cholesky_solve(centred_E1, factor_EE).squeeze(-1)
    return solved_E - solved_E.mean()


class _ImplicitPlan(torch.autograd.Function):
    """`apply(A, M, tau)`: the plans M [L, N, E] as differentiable functions of A.

    Differentiating softmax rows and column constraints of eq:entropic_ot at the solution M, with
    G = dL/dM, r = (M*G) 1 and c = (M*G)^T 1 (* is elementwise), gives

        (diag(M^T 1) - M^T M) b = c - M^T r,    a = r - M b
        dL/dA = (M*G - M*(a 1^T + 1 b^T)) / tau

    Gradient:
        First derivatives, exact up to the marginal error of the plan. Finite for every plan:
        directions in which it is saturated beyond the rounding of its dtype are damped, and their
        share of the gradient is below that rounding.
    """

    @staticmethod
    def forward(ctx: Any, affinity_LNE: Tensor, plan_LNE: Tensor, tau: float) -> Tensor:
        ctx.tau = tau
        output_LNE = plan_LNE.detach()
        ctx.save_for_backward(output_LNE)
        return output_LNE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (plan_LNE,) = ctx.saved_tensors
        flow_LNE = torch.empty_like(plan_LNE)
        if len(plan_LNE):
            _write_gradient(flow_LNE, plan_LNE, grad_outputs[0], ctx.tau)
        return flow_LNE, None, None


@in_float32()
def _write_gradient(flow_LNE: Tensor, plan_LNE: Tensor, grad_LNE: Tensor, tau: float) -> None:
    """Write dL/dA to `flow_LNE`. The host waits for the device twice, for all layers together."""
    net_LE = torch.stack([
        _write_flow(flow_NE, plan_NE, grad_NE, tau)
        for flow_NE, plan_NE, grad_NE in zip(flow_LNE, plan_LNE, grad_LNE, strict=True)
    ]).cpu()  # fmt: skip
    overlaps_LEE = torch.stack([overlaps(plan_NE) for plan_NE in plan_LNE]).cpu()
    rounding = torch.finfo(plan_LNE.dtype).eps
    potential_LE = torch.stack([
        solved(factor_of(overlaps_EE, rounding), net_E)
        for overlaps_EE, net_E in zip(overlaps_LEE, net_LE, strict=True)
    ]).to(plan_LNE)  # fmt: skip
    for flow_NE, plan_NE, potential_E in zip(flow_LNE, plan_LNE, potential_LE, strict=True):
        _balance_flow(flow_NE, plan_NE, potential_E)


def _write_flow(flow_NE: Tensor, plan_NE: Tensor, grad_NE: Tensor, tau: float) -> Tensor:
    """Write M*(G - r) / tau of one layer; return its column sums, [E], in float64.

    It is formed at once because c - M^T r is a small difference of two large sums.
    """
    net_E = torch.zeros(plan_NE.shape[1], dtype=torch.float64, device=plan_NE.device)
    for rows in row_blocks(plan_NE):
        plan, grad, flow = plan_NE[rows], grad_NE[rows], flow_NE[rows]
        torch.sub(grad, (plan * grad).sum(dim=-1, keepdim=True), out=flow)
        flow *= 1.0 / tau
        flow *= plan
        net_E += flow.sum(dim=0)
    return net_E


def _balance_flow(flow_NE: Tensor, plan_NE: Tensor, potential_E: Tensor) -> None:
    """Subtract M*(1 b^T - (M b) 1^T) of one layer, so that columns sum to 0."""
    for rows in row_blocks(plan_NE):
        plan, flow = plan_NE[rows], flow_NE[rows]
        flow.addcmul_(plan, potential_E - (plan @ potential_E).unsqueeze(-1), value=-1.0)
