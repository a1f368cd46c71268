"""2:4 sparsity, two zeros in every four weights of a row, by four published scores.

All linear maps of the decoder layers are pruned; embeddings, head and norms stay. The four weights
belong to consecutive inputs of one output; of equal scores the first are removed.

Magnitude, the control, reads no text. Wanda scores weights by |W_ij| ||x_j||, with the norm of
input feature j over all calibration tokens, computed after the layers that are already pruned; here
norms are summed in float64.

Pruner-Zero, found by genetic search, scores weights by w^2 (g - min g), with g the root of the sum
over windows of (dl/dw)^2, l the next-token loss of one window in the dense model, and min g the
least g of the matrix. Inputs of the maps do not enter. The published code takes 128 windows; here
all windows of the calibration text are read.

SparseGPT lets the remaining weights compensate for the removed ones (optimal brain surgeon, in
blocks). H = X^T X is the Hessian of a map's inputs, damped by 1 % of its mean diagonal, and U^T U =
H^-1. Columns are processed from left to right: at the first column of each four, the two weights of
smallest w^2 / U_jj^2 are chosen by their current values, and the error w / U_jj of what is set to
zero is subtracted from all later columns in proportion to U's row, within blocks of 128 columns at
once, in later columns after each block. Here all of it is float64, weights of features that are
always zero are pruned first, and a Hessian without a Cholesky factor is refused.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dotmoe.common.errors import UserError
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.hooks import input_hooks
from dotmoe.models.stream import Stream
from dotmoe.rivals.pruning.contract import Pruned, PruneInputs, backward, damped_inverse, linears_of

_COLUMNS_AT_ONCE = 128


def magnitude(inputs: PruneInputs) -> Pruned:
    """Set the two smallest weights of each four to zero."""
    for linear in linears_of(inputs.layers):
        linear.weight *= kept_of_four(linear.weight.abs())
    return _halved(inputs)


def wanda(inputs: PruneInputs) -> Pruned:
    """Prune every linear map by |weight| times the norm of its input feature."""

    def pruned(square_I: Tensor, weight_OI: Tensor) -> Tensor:
        return weight_OI * kept_of_four(weight_OI.abs() * square_I.sqrt())

    return _by_layers(inputs, lambda x_TI: x_TI.square().sum(dim=0), pruned)


def pruner_zero(inputs: PruneInputs) -> Pruned:
    """Prune every linear map by weight and gradient."""
    weights = [linear.weight for linear in linears_of(inputs.layers)]
    squares = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]

    def add() -> None:
        for weight, square in zip(weights, squares, strict=True):
            if weight.grad is not None:
                square += weight.grad.float().square()
                weight.grad = None

    backward(inputs, rows=1, after=add)
    for weight, square in zip(weights, squares, strict=True):
        slope = square.double().sqrt()
        weight *= kept_of_four(weight.double().square() * (slope - slope.min()))
    inputs.dense.model.requires_grad_(False)
    return _halved(inputs)


def sparsegpt(inputs: PruneInputs) -> Pruned:
    """Prune every linear map, and correct its remaining weights."""
    return _by_layers(inputs, lambda x_TI: x_TI.T @ x_TI, corrected)


def corrected(
    hessian_II: Float[Tensor, "I I"], weight_OI: Float[Tensor, "O I"]
) -> Float[Tensor, "O I"]:
    """The pruned weight of a map with this Hessian, its remaining entries corrected; float64."""
    is_read_I = hessian_II.diagonal() > 0
    hessian_II.diagonal()[~is_read_I] = 1
    factor_II = torch.linalg.cholesky(damped_inverse(hessian_II), upper=True)
    scale_I = factor_II.diagonal()
    weight_OI = weight_OI * is_read_I
    kept_OI = torch.empty_like(weight_OI, dtype=torch.bool)
    for start in range(0, weight_OI.shape[1], _COLUMNS_AT_ONCE):
        stop = min(start + _COLUMNS_AT_ONCE, weight_OI.shape[1])
        errors = []
        for j in range(start, stop):
            if j % 4 == 0:
                four = slice(j, j + 4)
                kept_OI[:, four] = kept_of_four((weight_OI[:, four] / scale_I[four]).square())
            error_O1 = (weight_OI[:, j] / scale_I[j] * ~kept_OI[:, j])[:, None]
            weight_OI[:, j:stop] -= error_O1 * factor_II[j, j:stop]
            errors.append(error_O1)
        weight_OI[:, stop:] -= torch.cat(errors, dim=1) @ factor_II[start:stop, stop:]
    return weight_OI * kept_OI


def require(dense: DenseModel, _: torch.device) -> None:
    """Raise a `UserError` if a linear map's number of inputs is not a multiple of 4."""
    for linear in linears_of(dense.family.layers(dense.model)):
        if linear.in_features % 4:
            raise UserError(
                f"a linear map reads {linear.in_features} features, not a multiple of 4, so "
                "2:4 does not fit the model. Leave the 2_4 methods out."
            )


def kept_of_four(score_OI: Float[Tensor, "O I"]) -> Bool[Tensor, "O I"]:
    """Mask of the two largest scores in each four; of equal scores the later ones are kept."""
    fours = score_OI.reshape(len(score_OI), -1, 4)
    return fours.argsort(dim=-1, stable=True).argsort(dim=-1).flatten(1) >= 2


def _by_layers(
    inputs: PruneInputs,
    moment: Callable[[Tensor], Tensor],
    pruned: Callable[[Tensor, Tensor], Tensor],
) -> Pruned:
    """Prune the linear maps of each layer by their inputs after the pruned layers before it.

    `moment` of a map's inputs [T, I] is summed over all tokens; from that sum and the weight [O, I]
    `pruned` makes the new weight, in float64.
    """
    stream = Stream(inputs.dense, inputs.tokens_BT)
    sums = dict[int, Any]()

    def see(number: int, x: Tensor) -> None:
        sums[number] = sums.get(number, 0) + moment(x.flatten(0, -2).double())

    for index, layer in enumerate(inputs.layers):
        linears = dict(enumerate(linears_of(layer)))
        with input_hooks(linears, see):
            for part in stream.parts:
                stream.after(index, part)
        for number, linear in linears.items():
            linear.weight.copy_(pruned(sums.pop(number), linear.weight.double()))
        stream.advance(index)
        inputs.on_progress(index + 1, len(inputs.layers))
    return _halved(inputs)


def _halved(inputs: PruneInputs) -> Pruned:
    removed = sum(linear.weight.numel() for linear in linears_of(inputs.layers)) // 2
    return Pruned(removed, {"pattern": "2:4"})
