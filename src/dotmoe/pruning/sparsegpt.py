"""SparseGPT: the weights that stay make up for those that go (optimal brain surgeon, blocked).

The published method in its 2:4 form. With the Hessian H = X^T X of a map's inputs, damped by 1 % of
its mean diagonal, and H^-1 = U^T U, columns go from left to right: of each four the two of smallest
w^2 / U_jj^2 are chosen when its first column comes, by the weights as they are then, and the error
w / U_jj of what is set to zero is taken out of all later columns in proportion to U's row. Columns
of 128 are corrected at once, the others after them. Here all of it is float64, features that are
never read are pruned first, and what has no Cholesky factor is refused.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dotmoe.errors import UserError
from dotmoe.pruning.contract import Pruned, PruneInputs
from dotmoe.pruning.two_of_four import kept_of_four, prune_linears

DAMPING = 0.01
_COLUMNS_AT_ONCE = 128


class _Curvature(NamedTuple):
    factor_II: Float[Tensor, "I I"]
    """U, upper triangular, with H^-1 = U^T U."""
    is_read_I: Bool[Tensor, " I"]


def sparsegpt_2_4(inputs: PruneInputs) -> Pruned:
    """Prune every linear map and correct the rest of it."""
    return prune_linears(
        inputs, moment=lambda x_TI: x_TI.T @ x_TI, prepare=_curvature, pruned=_corrected
    )


def _curvature(hessian_II: Float[Tensor, "I I"]) -> _Curvature:
    diagonal_I = hessian_II.diagonal()
    is_read_I = diagonal_I > 0
    diagonal_I[~is_read_I] = 1
    inverse_II = damped_inverse(hessian_II)
    return _Curvature(torch.linalg.cholesky(inverse_II, upper=True), is_read_I)


def damped_inverse(moment_II: Float[Tensor, "I I"]) -> Float[Tensor, "I I"]:
    """Inverse of a moment X^T X with 1 % of its mean diagonal added to the diagonal."""
    mean, moment_II = float(moment_II.diagonal().mean()), moment_II.clone()
    moment_II.diagonal().add_(DAMPING * mean or 1e-30)  # what is all zero has an inverse, too
    factor_II, failed = torch.linalg.cholesky_ex(moment_II)
    if failed:
        raise UserError(
            "the inputs of a linear map are no finite numbers, so it cannot be pruned by them. "
            "Load the model with --dtype float32."
        )
    return torch.cholesky_inverse(factor_II)


def made_up(
    weight_OI: Float[Tensor, "O I"], moment_II: Float[Tensor, "I I"], kept_I: Bool[Tensor, " I"]
) -> Float[Tensor, "O I"]:
    """Weight whose kept columns make up for the others, which are zero: damped least squares."""
    inverse_CI = damped_inverse(moment_II)[~kept_I]
    lost_CI: Tensor = torch.linalg.solve(inverse_CI[:, ~kept_I], inverse_CI)
    return (weight_OI - weight_OI[:, ~kept_I] @ lost_CI) * kept_I


def _corrected(weight_OI: Float[Tensor, "O I"], curvature: _Curvature) -> Float[Tensor, "O I"]:
    factor_II, is_read_I = curvature
    weight_OI = weight_OI * is_read_I
    scale_I, kept_OI = factor_II.diagonal(), torch.empty_like(weight_OI, dtype=torch.bool)
    for start in range(0, weight_OI.shape[1], _COLUMNS_AT_ONCE):
        stop, errors = min(start + _COLUMNS_AT_ONCE, weight_OI.shape[1]), []
        for j in range(start, stop):
            if j % 4 == 0:
                four = slice(j, j + 4)
                kept_OI[:, four] = kept_of_four((weight_OI[:, four] / scale_I[four]).square())
            error_O1 = (weight_OI[:, j] / scale_I[j] * ~kept_OI[:, j])[:, None]
            weight_OI[:, j:stop] -= error_O1 * factor_II[j, j:stop]
            errors.append(error_O1)
        weight_OI[:, stop:] -= torch.cat(errors, dim=1) @ factor_II[start:stop, stop:]
    return weight_OI * kept_OI
