"""The semi-dual of balanced transport, maximised for all layers at once.

Each layer runs its own damped Newton iteration at its own temperature. A layer that Newton cannot
solve at the wanted temperature is taken there in stages: solve where the plan is smooth, carry the
potential in units of affinity (tau * v) to a lower temperature, and repeat.
"""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dotmoe.transport.laplacian import plan_laplacian, solve_laplacian
from dotmoe.transport.plan import TransportPlan, column_sums

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
WIDE_LOGITS = 256.0
"""|A| / tau above which float32 logits would swallow the potential: they are formed in float64."""


@dataclass
class Layers:
    """Where each unsolved layer stands; `l` is their number, it falls as layers are done."""

    index: Int[Tensor, " l"]
    """Position in the batch."""
    logits: Float[Tensor, "l N E"]
    """A / tau + base, less its row maximum: near 0 where the plan has mass, so hardly rounded."""
    base: Float[Tensor, "l E"]
    """Potential already inside the logits."""
    offset: Float[Tensor, "l E"]
    """Accepted potential, less `base`."""
    direction: Float[Tensor, "l E"]
    step: Float[Tensor, " l"]
    slope: Float[Tensor, " l"]
    """Derivative of the dual along `direction` at `offset`."""
    norm: Float[Tensor, " l"]
    """Norm of the dual's gradient at `offset`."""
    tau: Float[Tensor, " l"]
    """Temperature of this stage."""
    passes: Int[Tensor, " l"]
    """Passes in this stage."""
    stale: Int[Tensor, " l"]
    """Passes in a row that did not take a third off the best error."""
    best_error: Float[Tensor, " l"]
    best: Float[Tensor, "l E"]
    """Potential (base + offset) of the best error of this stage."""
    solved_tau: Float[Tensor, " l"]
    """Lowest temperature solved so far, above the wanted one."""
    solved: Float[Tensor, "l E"]
    """Potential found there."""
    drift: Float[Tensor, "l E"]
    """Change of tau * potential a unit of temperature, between the last two stages solved."""
    factor: Float[Tensor, " l"]
    """Ratio of this stage's temperature to the next."""
    closing: Bool[Tensor, " l"]
    """The next pass is the last, whatever it finds."""

    def keep(self, kept: Bool[Tensor, " l"]) -> None:
        """Drop every layer that is not kept."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name)[kept])


class SemiDual:
    """One batch of transport problems (eq:entropic_ot) that share capacity and temperature."""

    def __init__(
        self, affinity_LNE: Float[Tensor, "L N E"], capacity: int, tau: float, tolerance: float
    ) -> None:
        self.affinity_LNE = affinity_LNE
        self.capacity = capacity
        self.tau = tau
        self.tolerance = tolerance
        low_L, high_L = torch.aminmax(affinity_LNE.flatten(1), dim=1)
        self.spread_L = (high_L.double() - low_L.double()).clamp_min(tau)
        widest = float(torch.maximum(low_L.abs(), high_L.abs()).max())
        self.wide = widest / tau > WIDE_LOGITS

    def solve(self, start_LE: Float[Tensor, "L E"], max_passes: int) -> TransportPlan:
        """Newton from `start_LE`, in float64 potentials; at most `max_passes` passes over A."""
        plan_LNE: Tensor | None = None
        potential_LE = torch.empty_like(start_LE)
        error_L = torch.empty_like(self.spread_L)
        layers = self._begin(start_LE)
        num_passes = 0
        while layers.index.numel():
            num_passes += 1
            if num_passes == max_passes:
                self._close(layers, torch.ones_like(layers.closing))
            trial = layers.offset + layers.step.unsqueeze(-1) * layers.direction
            plan = torch.softmax(
                layers.logits + trial.to(layers.logits.dtype).unsqueeze(-2), dim=-1
            )
            gradient = self.capacity - column_sums(plan, self.capacity)
            error = gradient.abs().amax(dim=-1) / self.capacity
            done = ((error <= self.tolerance) & (layers.tau == self.tau)) | layers.closing
            if bool(done.any()):
                solved = layers.index[done]
                potential_LE[solved] = (layers.base + trial)[done]
                error_L[solved] = error[done]
                if bool(done.all()) and done.numel() == error_L.numel():
                    plan_LNE = plan
                    break
                if plan_LNE is None:
                    plan_LNE = torch.empty_like(self.affinity_LNE)
                plan_LNE[solved] = plan[done]
                layers.keep(~done)
                plan, trial, gradient, error = (x[~done] for x in (plan, trial, gradient, error))
            if layers.index.numel():
                self._advance(layers, plan, trial, gradient, error)
        assert plan_LNE is not None
        return TransportPlan(plan_LNE, potential_LE, error_L, num_passes)

    def _begin(self, start_LE: Tensor) -> Layers:
        """All layers at the wanted temperature."""
        zero_LE, zero_L = torch.zeros_like(start_LE), torch.zeros_like(self.spread_L)
        count_L = torch.zeros_like(zero_L, dtype=torch.long)
        layers = Layers(
            index=torch.arange(len(count_L), device=count_L.device),
            logits=torch.empty_like(self.affinity_LNE),
            base=zero_LE,
            offset=zero_LE,
            direction=zero_LE,
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
        """Put a potential into the logits of some layers, less its mean."""
        potential = potential - potential.mean(dim=-1, keepdim=True)
        layers.base = torch.where(which.unsqueeze(-1), potential, layers.base)
        layers.offset = layers.offset.masked_fill(which.unsqueeze(-1), 0.0)
        dtype = torch.float64 if self.wide else layers.logits.dtype
        for row in which.nonzero().flatten().tolist():
            # One layer at a time: float64 logits of a whole model would not fit beside it.
            logits_NE = self.affinity_LNE[layers.index[row]].to(dtype) / layers.tau[row].to(dtype)
            logits_NE += layers.base[row].to(dtype)
            logits_NE -= logits_NE.amax(dim=-1, keepdim=True)
            layers.logits[row] = logits_NE

    def _enter_stage(self, layers: Layers, which: Tensor, tau: Tensor, potential: Tensor) -> None:
        """Send some layers to another temperature, starting at a potential."""
        if not bool(which.any()):
            return
        layers.tau = torch.where(which, tau, layers.tau)
        self._absorb(layers, which, potential)
        layers.direction = layers.direction.masked_fill(which.unsqueeze(-1), 0.0)
        layers.step = layers.step.masked_fill(which, 0.0)
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

    def _advance(
        self, layers: Layers, plan: Tensor, trial: Tensor, gradient: Tensor, error: Tensor
    ) -> None:
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
        self._shorten(layers, ~accepted, slope)
        self._point(layers, accepted & ~cooled & ~failed, plan, trial, gradient, norm)
        if bool((cooled | failed).any()):
            self._change_stage(layers, cooled, failed)

    def _shorten(self, layers: Layers, rejected: Tensor, slope: Tensor) -> None:
        """Step to where the slope, taken as linear, vanishes."""
        ratio = (layers.slope / (layers.slope - slope)).clamp(0.1, 0.7)
        layers.step = torch.where(rejected, layers.step * ratio, layers.step)

    def _point(
        self,
        layers: Layers,
        which: Tensor,
        plan: Tensor,
        trial: Tensor,
        gradient: Tensor,
        norm: Tensor,
    ) -> None:
        """Accept the trial of some layers and choose a Newton direction there."""
        if not bool(which.any()):
            return
        chosen = plan if bool(which.all()) else plan[which]
        column = (self.capacity - gradient[which]).clamp_min(1e-3 * self.capacity)
        move = solve_laplacian(
            plan_laplacian(chosen), column, gradient[which], damping=torch.finfo(plan.dtype).eps
        )
        largest = move.abs().amax(dim=-1, keepdim=True)
        move = move * (LARGEST_MOVE / largest.clamp_min(LARGEST_MOVE))
        layers.direction = layers.direction.clone()
        layers.direction[which] = move
        layers.offset = torch.where(which.unsqueeze(-1), trial, layers.offset)
        layers.slope = torch.where(which, (gradient * layers.direction).sum(dim=-1), layers.slope)
        layers.norm = torch.where(which, norm, layers.norm)
        layers.step = torch.where(which, 1.0, layers.step)
        far = which & (layers.offset.abs().amax(dim=-1) > 2 * LARGEST_MOVE)
        if bool(far.any()):
            self._absorb(layers, far, layers.base + layers.offset)

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
