"""The semi-dual of balanced transport, maximised for all layers at once.

Each layer runs its own damped Newton iteration at its own temperature. A layer that Newton cannot
solve at the wanted temperature is taken there in stages: solve where the plan is smooth, carry the
potential in units of affinity (tau * v) to a lower temperature, and repeat.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from dotmoe.transport.blocks import blocks
from dotmoe.transport.laplacian import (
    FactoredLaplacian,
    factor_laplacian,
    plan_laplacian,
)
from dotmoe.transport.newton_state import Layers, Solution
from dotmoe.transport.plan import column_sums

STAGE_TOLERANCE = 0.25
"""Neurons too many or too few at which a stage above the wanted temperature is left.

Below 1: a plan that is nearly 0/1 and gives an expert one neuron too many is not solved.
"""
FIRST_FACTOR, SMALLEST_FACTOR, LARGEST_FACTOR = 4.0, 1.01, 1e3
"""Ratio of the temperatures of two stages: the first, the last one tried, the boldest."""
LARGEST_MOVE = 4.0
"""Largest change of a log-potential in one Newton step; the quadratic model is void beyond."""
STALE_PASSES = 4
"""Passes in a row, none of which takes a third off the best error, that end a stage."""
NARROW_LOGITS = 20.0
"""|A| / tau + |v| up to which exponentials can neither overflow nor lose a row."""
WIDE_LOGITS = 512.0
"""|A| / tau + |v| above which float32 would round logits too much: they are formed in float64."""


class SemiDual:
    """One batch of transport problems (eq:entropic_ot) that share capacity and temperature."""

    def __init__(
        self,
        affinity_LNE: Float[Tensor, "L N E"],
        low_L: Float[Tensor, " L"],
        high_L: Float[Tensor, " L"],
        *,
        capacity: int,
        tau: float,
        tolerance: float,
    ) -> None:
        self.affinity_LNE = affinity_LNE
        self.capacity = capacity
        self.tau = tau
        self.tolerance = tolerance
        self.spread_L = (high_L.double() - low_L.double()).clamp_min(tau)
        self.widest = float(torch.maximum(low_L.abs(), high_L.abs()).max())
        self.rebuild = True
        """Whether a base or a temperature changed since the plan was formed."""
        tiny, num_experts = torch.finfo(affinity_LNE.dtype).tiny, affinity_LNE.shape[-1]
        self.lowest_logit = 0.5 * math.log(tiny) + math.log(num_experts)
        """Keeps products of two entries of the plan normal: a CPU is a hundred times slower at
        arithmetic on denormals."""

    def solve(self, solution: Solution, max_passes: int) -> int:
        """Newton from the potential in `solution`, all of which is overwritten.

        Args:
            solution: Receives plan, potential, error and Hessian.
            max_passes: Upper bound on passes over all N x E entries.

        Returns:
            Passes taken.
        """
        layers = self._begin(solution.potential_LE, solution.plan_LNE)
        num_passes = 0
        while True:
            num_passes += 1
            if num_passes == max_passes:
                self._close(layers, torch.ones_like(layers.closing))
            trial = layers.offset + layers.step.unsqueeze(-1) * layers.direction
            gradient = self.capacity - self._column_sums(layers, trial)
            error = gradient.abs().amax(dim=-1) / self.capacity
            done = ((error <= self.tolerance) & (layers.tau == self.tau)) | layers.closing
            some_done, all_done = torch.stack([done.any(), done.all()]).tolist()
            if some_done:
                solution.take(layers, done, trial, error)
                if all_done:
                    return num_passes
                layers.keep(~done)
                trial, gradient, error = trial[~done], gradient[~done], error[~done]
            self._advance(layers, trial, gradient, error)

    def _column_sums(self, layers: Layers, trial: Tensor) -> Tensor:
        """One pass: the plan of `trial`, into `layers.plan`, and its column sums."""
        form = self._kernel_former(layers) if self.rebuild else None
        # A change of potential scales the columns, so that the plan before serves as the kernel.
        scale = (trial - layers.plan_offset if form is None else trial).exp()
        scale = scale.unsqueeze(-2).to(layers.plan.dtype)
        layers.plan_offset = trial
        self.rebuild = False
        sums = torch.zeros_like(trial)
        for which, rows in blocks(layers.plan.shape, layers.plan.device):
            plan = layers.plan[which, rows]
            if form is not None:
                form(plan, which, rows)
            plan *= scale[which]
            plan *= plan.sum(dim=-1, keepdim=True).reciprocal_()
            sums[which] += column_sums(plan, self.capacity)
        return sums

    def _kernel_former(self, layers: Layers) -> Callable[[Tensor, slice, slice], None]:
        """Writes exp(A / tau + base), times a constant of each row, into a block of a plan."""
        affinity = self.affinity_LNE
        if len(layers.index) < len(affinity):
            affinity = affinity[layers.index]
        widest = self.widest / self.tau + float(layers.base.abs().max())
        dtype = torch.float64 if widest > WIDE_LOGITS else affinity.dtype
        sharpness = layers.tau.reciprocal().view(-1, 1, 1).to(dtype)
        base = layers.base.unsqueeze(-2).to(dtype)

        def form(plan: Tensor, which: slice, rows: slice) -> None:
            logits = plan if plan.dtype == dtype else plan.to(dtype)
            torch.addcmul(base[which], affinity[which, rows], sharpness[which], out=logits)
            if widest > NARROW_LOGITS:
                logits -= logits.amax(dim=-1, keepdim=True)
                logits.clamp_min_(self.lowest_logit)
            logits.exp_()
            if logits is not plan:
                plan.copy_(logits)

        return form

    def _begin(self, start_LE: Tensor, plan_LNE: Tensor) -> Layers:
        """All layers at the wanted temperature."""
        zero_LE, zero_L = torch.zeros_like(start_LE), torch.zeros_like(self.spread_L)
        count_L = torch.zeros_like(zero_L, dtype=torch.long)
        layers = Layers(
            index=torch.arange(len(count_L), device=count_L.device),
            plan=plan_LNE,
            plan_offset=zero_LE,
            base=zero_LE,
            offset=zero_LE,
            direction=zero_LE,
            hessian=torch.diag_embed(torch.ones_like(zero_LE)),
            hessian_scale=torch.zeros_like(zero_LE),
            step=zero_L,
            slope=zero_L,
            norm=zero_L,
            tau=torch.full_like(zero_L, self.tau),
            passes=count_L,
            stale=count_L,
            best_error=zero_L,
            best=zero_LE,
            # So hot that v = 0 solves it: the first stage after a failure starts from there.
            solved_tau=self.spread_L * FIRST_FACTOR,
            solved=zero_LE,
            drift=zero_LE,
            factor=torch.full_like(zero_L, FIRST_FACTOR),
            closing=torch.zeros_like(zero_L, dtype=torch.bool),
        )
        everything = torch.ones_like(layers.closing)
        self._enter_stage(layers, everything, layers.tau, start_LE)
        return layers

    def _absorb(self, layers: Layers, which: Tensor, potential: Tensor) -> None:
        """Make a potential the base of some layers, less its mean."""
        potential = potential - potential.mean(dim=-1, keepdim=True)
        layers.base = torch.where(which.unsqueeze(-1), potential, layers.base)
        layers.offset = layers.offset.masked_fill(which.unsqueeze(-1), 0.0)
        self.rebuild = True

    def _enter_stage(self, layers: Layers, which: Tensor, tau: Tensor, potential: Tensor) -> None:
        """Send some layers to another temperature, starting at a potential."""
        if not bool(which.any()):
            return
        layers.tau = torch.where(which, tau, layers.tau)
        self._absorb(layers, which, potential)
        layers.direction = layers.direction.masked_fill(which.unsqueeze(-1), 0.0)
        layers.step = layers.step.masked_fill(which, 0.0)
        layers.norm = layers.norm.masked_fill(which, 0.0)
        layers.passes = layers.passes.masked_fill(which, 0)
        layers.stale = layers.stale.masked_fill(which, 0)
        layers.best_error = layers.best_error.masked_fill(which, torch.inf)

    def _close(self, layers: Layers, which: Tensor) -> None:
        """Make the next pass of some layers the last: at the best potential, wanted temperature."""
        fresh = layers.passes == 0
        best = torch.where(fresh.unsqueeze(-1), layers.base, layers.best)
        target = torch.full_like(layers.tau, self.tau)
        self._enter_stage(layers, which, target, best * (layers.tau / target).unsqueeze(-1))
        layers.closing = layers.closing | which

    def _advance(self, layers: Layers, trial: Tensor, gradient: Tensor, error: Tensor) -> None:
        """Judge the trial of every layer: next stage, new direction, shorter step, or give up."""
        slope = (gradient * layers.direction).sum(dim=-1)
        norm = torch.linalg.vector_norm(gradient, dim=-1)
        # The dual is concave: while it still rises at the trial, the trial lies higher.
        accepted = (layers.passes == 0) | (slope >= 0) | (norm < 0.9 * layers.norm)
        better = error < layers.best_error
        layers.stale = torch.where(error < 0.67 * layers.best_error, 0, layers.stale + 1)
        layers.best = torch.where(better.unsqueeze(-1), layers.base + trial, layers.best)
        layers.best_error = torch.where(better, error, layers.best_error)
        layers.passes = layers.passes + 1

        cooled = (layers.tau > self.tau) & (error * self.capacity <= STAGE_TOLERANCE)
        failed = ~cooled & (layers.stale >= STALE_PASSES)
        pointed = accepted & ~cooled & ~failed
        far = pointed & (trial.abs().amax(dim=-1) > 2 * LARGEST_MOVE)
        # With the Hessian it has, a step gains as much as the one before: two such are cheaper than
        # another Hessian.
        near = error * (norm / layers.norm).square() <= 0.5 * self.tolerance
        fresh = pointed & ~near
        # One look from the host at all that is to be decided.
        signs = [fresh.all(), fresh.any(), far.any(), (cooled | failed).any()]
        all_fresh, some_fresh, some_far, some_changed = torch.stack(signs).tolist()
        self._shorten(layers, ~accepted, slope)
        if some_fresh:
            self._factor(layers, slice(None) if all_fresh else fresh, gradient)
        self._point(layers, pointed, trial, gradient, norm)
        if some_far:
            self._absorb(layers, far, layers.base + layers.offset)
        if some_changed:
            self._change_stage(layers, cooled, failed)

    def _shorten(self, layers: Layers, rejected: Tensor, slope: Tensor) -> None:
        """Step to where the slope, taken as linear, vanishes."""
        ratio = (layers.slope / (layers.slope - slope)).clamp(0.1, 0.7)
        layers.step = torch.where(rejected, layers.step * ratio, layers.step)

    def _factor(self, layers: Layers, pick: slice | Tensor, gradient: Tensor) -> None:
        """Hessian of some layers at their plan."""
        plan = layers.plan[pick]
        factored = factor_laplacian(
            plan_laplacian(plan),
            (self.capacity - gradient[pick]).clamp_min(1e-3 * self.capacity),
            damping=torch.finfo(plan.dtype).eps,
        )
        layers.hessian[pick] = factored.factor_LEE
        layers.hessian_scale[pick] = factored.scale_LE

    def _point(
        self, layers: Layers, which: Tensor, trial: Tensor, gradient: Tensor, norm: Tensor
    ) -> None:
        """Accept the trial of some layers and choose a Newton direction there."""
        factored = FactoredLaplacian(factor_LEE=layers.hessian, scale_LE=layers.hessian_scale)
        move = factored.solve(gradient)
        largest = move.abs().amax(dim=-1, keepdim=True)
        move = move * (LARGEST_MOVE / largest.clamp_min(LARGEST_MOVE))
        which_1 = which.unsqueeze(-1)
        layers.direction = torch.where(which_1, move, layers.direction)
        layers.offset = torch.where(which_1, trial, layers.offset)
        layers.slope = torch.where(which, (gradient * move).sum(dim=-1), layers.slope)
        layers.norm = torch.where(which, norm, layers.norm)
        layers.step = torch.where(which, 1.0, layers.step)

    def _change_stage(self, layers: Layers, cooled: Tensor, failed: Tensor) -> None:
        """Cool layers that solved their stage; retry the others from the last one they solved."""
        self._record_stage(layers, cooled)
        growth = torch.where(layers.passes <= 2, 1.5, 1.0)
        factor = torch.where(cooled, layers.factor**growth, layers.factor.sqrt())
        layers.factor = torch.where(
            cooled | failed, factor.clamp_max(LARGEST_FACTOR), layers.factor
        )
        # Close enough that only rounding is in the way, or no smaller stage left to try.
        stuck = failed & (layers.tau == self.tau) & (layers.best_error < 5e-6)
        stuck |= failed & (layers.factor < SMALLEST_FACTOR)
        tau = (layers.solved_tau / layers.factor).clamp_min(self.tau)
        ratio = (layers.solved_tau / tau).unsqueeze(-1)
        potential = layers.solved * ratio + layers.drift * (1.0 - ratio)
        self._enter_stage(layers, (cooled | failed) & ~stuck, tau, potential)
        if bool(stuck.any()):
            self._close(layers, stuck)

    def _record_stage(self, layers: Layers, cooled: Tensor) -> None:
        """Remember what the next stage is extrapolated from: tau * v is nearly linear in tau."""
        which = cooled.unsqueeze(-1)
        hot, cold = layers.solved_tau.unsqueeze(-1), layers.tau.unsqueeze(-1)
        # The stage before the first is v = 0 at a temperature that was only assumed, not solved.
        known = which & (layers.solved != 0).any(dim=-1, keepdim=True) & (hot > cold)
        drift = (hot * layers.solved - cold * layers.best) / torch.where(known, hot - cold, 1.0)
        layers.drift = torch.where(known, drift, layers.drift)
        layers.solved_tau = torch.where(cooled, layers.tau, layers.solved_tau)
        layers.solved = torch.where(which, layers.best, layers.solved)
