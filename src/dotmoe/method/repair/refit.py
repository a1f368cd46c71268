"""The refit: the output projection of an FFN or of attention, by ridge regression."""

from functools import partial
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dotmoe.common.distributed import sum_over_ranks
from dotmoe.common.precision import in_float32
from dotmoe.method.repair.problem import LARGEST_WEIGHT, LayerProblem

RIDGES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0, 10.0)
"""Penalties to try, as shares of the mean diagonal of the Gram matrix."""
SOLUTIONS = 4
"""Solutions that a layer usually takes: three near the last layer's penalty, and the final one."""
_COLUMNS = 2_048
"""Columns of the Gram matrix that are summed at once on a GPU."""


class NormalEquations:
    """Weighted sums over tokens for dW = argmin sum_t w_t ||z_t dW - r_t||^2, in float64.

    `group_of_N` has the group of each column of z, a number from 0. Inside, columns are in the
    order of the groups. They are summed by groups, so that of z^T z there is the upper triangle.
    """

    def __init__(self, group_of_N: Tensor, width: int) -> None:
        zeros = partial(torch.zeros, dtype=torch.float64, device=group_of_N.device)
        num_columns = len(group_of_N)
        self._order_N = group_of_N.argsort(stable=True)
        self._bounds = self._bounds_of_groups(group_of_N)
        self.gram_NN = zeros(num_columns, num_columns)
        self.cross_ND = zeros(num_columns, width)
        self.missing = zeros(())

    def _bounds_of_groups(self, group_of_N: Tensor) -> list[int]:
        """First column of each group, and the number of all columns."""
        return [*range(0, len(group_of_N), _COLUMNS), len(group_of_N)]

    @in_float32()
    def add(self, hidden_TN: Tensor, missing_TD: Tensor, weight_T: Tensor) -> None:
        """Add tokens: masked activations z, what the output lacks (r), and weights w; float32."""
        hidden_TN = hidden_TN.index_select(1, self._order_N)
        weighted_TD = missing_TD * weight_T[:, None]
        self.missing += (missing_TD * weighted_TD).sum()
        for start, end in pairwise(self._bounds):
            self._add_group(start, end, hidden_TN[:, start:], weighted_TD, weight_T)

    def _add_group(
        self, start: int, end: int, hidden_TM: Tensor, weighted_TD: Tensor, weight_T: Tensor
    ) -> None:
        """Add to the rows of one group: M columns, those of the group and all behind it."""
        group_TS = hidden_TM[:, : end - start]
        self.cross_ND[start:end] += group_TS.T @ weighted_TD
        self.gram_NN[start:end, start:] += (group_TS * weight_T[:, None]).T @ hidden_TM

    def sum_over_ranks(self) -> None:
        """Add the sums of all ranks, which must call this together; all have them afterwards."""
        for sums in (self.gram_NN, self.cross_ND, self.missing):
            sum_over_ranks(sums)

    def solved(self, ridge: float) -> Float[Tensor, "N D"]:
        """The solution with a penalty on its square: `ridge` (above 0) times the mean diagonal."""
        penalised_NN = self.gram_NN.clone()
        penalised_NN.diagonal().add_(ridge * self.gram_NN.diagonal().mean())
        factor_NN, failed = torch.linalg.cholesky_ex(penalised_NN, upper=True)
        if failed:  # nothing ran, or nothing is finite: there is nothing to fit
            return torch.zeros_like(self.cross_ND)
        solution_ND = torch.cholesky_solve(self.cross_ND, factor_NN, upper=True)
        return torch.empty_like(solution_ND).index_copy_(0, self._order_N, solution_ND)

    def error(self, change_ND: Tensor) -> float:
        """Weighted square error with dW, as a share of that with 0: below 1 is a gain."""
        change_ND = change_ND[self._order_N]
        diagonal_N1 = self.gram_NN.diagonal()[:, None]
        twice_ND = 2 * (self.gram_NN.triu() @ change_ND) - diagonal_N1 * change_ND
        change = ((twice_ND - 2 * self.cross_ND) * change_ND).sum()
        return float(1 + change / self.missing) if self.missing else 1.0


class NormalEquationsByExpert(NormalEquations):
    """The same sums, for a CPU: a group is an expert, summed over the tokens on which it runs.

    Where an expert does not run, its columns of z are zero.
    """

    def _bounds_of_groups(self, group_of_N: Tensor) -> list[int]:
        return [0, *group_of_N.bincount().cumsum(0).tolist()]

    def _add_group(
        self, start: int, end: int, hidden_TM: Tensor, weighted_TD: Tensor, weight_T: Tensor
    ) -> None:
        row_R = hidden_TM[:, : end - start].any(1).nonzero().squeeze(1)
        rows = (each.index_select(0, row_R) for each in (hidden_TM, weighted_TD, weight_T))
        super()._add_group(start, end, *rows)


def equations(problem: LayerProblem) -> tuple[NormalEquations, NormalEquations]:
    """Sums over the tokens to fit, and over those held out, with the weights of now."""
    device = problem.output.weight.device
    kind = NormalEquationsByExpert if device.type == "cpu" else NormalEquations
    width = problem.output.out_features
    fitted, heldout = (kind(problem.group_of_N, width) for _ in range(2))
    run = list[tuple[Tensor, Tensor]]()

    def keep(module: nn.Module, args: tuple[Tensor], product: Tensor) -> None:
        run.append((args[0].float().flatten(0, -2), product.float().flatten(0, -2)))

    with problem.output.register_forward_hook(keep):
        for part in problem.parts:
            missing_TD = problem.lacking(part).flatten(0, 1)
            weight_T = problem.weight_BT[part].flatten().to(device)
            hidden_TN, product_TD = run.pop()
            if problem.gain_D is not None:
                missing_TD, scale_T = _before_norm(missing_TD, product_TD, problem.gain_D)
                weight_T = weight_T / scale_T.square()
            sums = fitted if part.start < problem.num_fitted else heldout
            sums.add(hidden_TN, missing_TD, weight_T)
    fitted.sum_over_ranks()
    heldout.sum_over_ranks()
    return fitted, heldout


def refit(
    output: nn.Linear, fitted: NormalEquations, heldout: NormalEquations, near: float | None = None
) -> tuple[Tensor, float | None, float]:
    """The output projection, [D, N], fitted to all tokens with the penalty best for held-out ones.

    `near` is a penalty to search around, as in `_best_ridge`. Returns also the penalty, and the
    held-out error as of `NormalEquations.error` when only the others are fitted; the projection as
    it is, None and 1 if no penalty gains.
    """
    ridge, error = _best_ridge(fitted, heldout, near)
    before_DN = output.weight.double()
    if not error < 1:
        return before_DN, None, 1.0
    fitted.gram_NN += heldout.gram_NN
    fitted.cross_ND += heldout.cross_ND
    return before_DN + fitted.solved(ridge).T, ridge, error


def _best_ridge(
    fitted: NormalEquations, heldout: NormalEquations, near: float | None
) -> tuple[float, float]:
    """The penalty of `RIDGES` with the least held-out error, and this error.

    Without `near` all are tried. Else the search begins there and goes on while a neighbour is
    better, because each costs a factorisation of the Gram matrix.
    """
    errors = dict[int, float]()

    def error(index: int) -> float:
        if index not in errors:
            errors[index] = heldout.error(fitted.solved(RIDGES[index]))
        return errors[index]

    if near is None:
        best = min(range(len(RIDGES)), key=error)
        return RIDGES[best], error(best)
    best = RIDGES.index(near)
    neighbours = [best + 1, best - 1]
    while neighbours:
        index = neighbours.pop(0)
        if index in range(len(RIDGES)) and error(index) < error(best):
            best = index
            neighbours += [index + 1, index - 1]
    return RIDGES[best], error(best)


def _before_norm(missing_TD: Tensor, product_TD: Tensor, gain_D: Tensor) -> tuple[Tensor, Tensor]:
    """What a product lacks before a norm, if its size stays what it is; and that size, [T]."""
    scale_T = product_TD.square().mean(1).sqrt()
    least = scale_T.median().double() / LARGEST_WEIGHT + 1e-30
    scale_T = scale_T.clamp_min(least.float())
    power_D = gain_D.square()  # damped: a gain near zero asks for next to nothing
    return missing_TD * scale_T[:, None] * gain_D / (power_D + 0.01 * power_D.mean()), scale_T
