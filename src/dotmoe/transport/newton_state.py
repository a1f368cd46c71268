"""What Newton's method remembers of each problem of a batch."""

from dataclasses import dataclass, fields

from jaxtyping import Bool, Float, Int
from torch import Tensor

from dotmoe.transport.laplacian import FactoredLaplacian


@dataclass
class Layers:
    """Where each unsolved layer stands; `l` is their number, it falls as layers are done."""

    index: Int[Tensor, " l"]
    """Position in the batch."""
    plan: Float[Tensor, "l N E"]
    """Of the last trial."""
    plan_offset: Float[Tensor, "l E"]
    """Potential of that trial, less `base`."""
    base: Float[Tensor, "l E"]
    """Potential that the plan was formed at; later ones only scale its columns."""
    offset: Float[Tensor, "l E"]
    """Accepted potential, less `base`."""
    direction: Float[Tensor, "l E"]
    hessian: Float[Tensor, "l E E"]
    """Cholesky factor behind the last direction, see `FactoredLaplacian`."""
    hessian_scale: Float[Tensor, "l E"]
    """Its scale; 0: there is none yet."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """Where the solved problems of a batch are written to."""

    plan_LNE: Float[Tensor, "L N E"]
    potential_LE: Float[Tensor, "L E"]
    """Holds the start until it holds the solution."""
    error_L: Float[Tensor, " L"]
    """Largest relative error of a column sum."""
    hessian: FactoredLaplacian
    """At a plan near the solution; scale 0 where none was needed."""

    def part(self, group: slice) -> "Solution":
        """The same memory, for some of the layers."""
        return Solution(
            plan_LNE=self.plan_LNE[group],
            potential_LE=self.potential_LE[group],
            error_L=self.error_L[group],
            hessian=FactoredLaplacian(
                factor_LEE=self.hessian.factor_LEE[group], scale_LE=self.hessian.scale_LE[group]
            ),
        )

    def take(self, layers: Layers, done: Tensor, trial: Tensor, error: Tensor) -> None:
        """Write down the layers that are done at a trial."""
        solved = layers.index[done]
        self.potential_LE[solved] = (layers.base + trial)[done]
        self.error_L[solved] = error[done]
        self.hessian.factor_LEE[solved] = layers.hessian[done]
        self.hessian.scale_LE[solved] = layers.hessian_scale[done]
        if layers.plan is not self.plan_LNE:
            self.plan_LNE[solved] = layers.plan[done]
