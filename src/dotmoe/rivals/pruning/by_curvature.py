"""K-OBD and LLM Surgeon: remove the rows and columns of matrices that affect the loss least.

The curvature of the loss at a linear map W is taken as the Kronecker product of two sums over
tokens: A of x x^T, with a 1 appended to x for a bias, and G of g g^T, where g is the gradient of a
window's mean next-token loss at the map's output. Rows and columns of all maps of the decoder
layers, each map on its own, are removed below one threshold of cost, the highest within the budget,
in 40 shots of equal size; before each the curvature is computed anew. Parameters are counted as if
every map were cut; the checkpoint holds zeros.

K-OBD (optimal brain damage) is the control of the LLM Surgeon's authors: row r costs w_r A w_r^T
G_rr / 2, column c w_c^T G w_c A_cc / 2, and the rest does not change. LLM Surgeon (optimal brain
surgeon), without its interleaved low-rank training, damps both factors by 1 % of their mean
diagonal: row r costs w_r A w_r^T / [G^-1]_rr / 2, column c w_c^T G w_c / [A^-1]_cc / 2. The best
change of the rest under G x A is, for columns, the least-squares fit of the removed ones' inputs by
the kept ones', and for rows the same with G; both are computed from the same weight, and added.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dotmoe.common.device import memory_of
from dotmoe.common.errors import UserError
from dotmoe.common.progress import no_update
from dotmoe.common.tables import in_bytes
from dotmoe.models.dense_model import DenseModel
from dotmoe.rivals.pruning.contract import (
    Pruned,
    PruneInputs,
    backward,
    compensated,
    damped_inverse,
    linears_of,
    threshold,
)

SHOTS = 40

Pair = tuple[Tensor, Tensor]
"""A pair for a map's columns and rows, in this order: factors A and G, costs, or kept masks."""


def k_obd(inputs: PruneInputs) -> Pruned:
    """Remove rows and columns by their own curvature; the rest does not change."""
    return _in_shots(inputs, damage, lambda weight_OI, factors, kept: weight_OI)


def damage(weight_OI: Tensor, factors: Pair) -> Pair:
    """Costs of columns and rows if nothing compensates for them."""
    column_I, row_O = _quadratics(weight_OI, factors)
    return column_I * factors[0].diagonal() / 2, row_O * factors[1].diagonal() / 2


def llm_surgeon(inputs: PruneInputs) -> Pruned:
    """Remove rows and columns by the loss after the best change of the rest, which is applied."""
    return _in_shots(inputs, damage_left, moved)


def damage_left(weight_OI: Tensor, factors: Pair) -> Pair:
    """Costs of columns and rows after the best change of the rest."""
    inverse_I, inverse_O = (damped_inverse(factor).diagonal() for factor in factors)
    column_I, row_O = _quadratics(weight_OI, factors)
    return column_I / inverse_I / 2, row_O / inverse_O / 2


def moved(weight_OI: Tensor, factors: Pair, kept: Pair) -> Tensor:
    """The weight whose kept columns and rows compensate for the removed ones."""
    by_columns_OI = compensated(weight_OI, factors[0], kept[0])
    return by_columns_OI + compensated(weight_OI.T, factors[1], kept[1]).T - weight_OI


def _quadratics(weight_OI: Tensor, factors: Pair) -> Pair:
    """w_c^T G w_c of each column and w_r A w_r^T of each row."""
    reads_II, slopes_OO = factors
    return (slopes_OO @ weight_OI * weight_OI).sum(0), (weight_OI @ reads_II * weight_OI).sum(1)


def _in_shots(
    inputs: PruneInputs,
    costs_of: Callable[[Tensor, Pair], Pair],
    updated: Callable[[Tensor, Pair, Pair], Tensor],
) -> Pruned:
    """Remove rows and columns by cost; weights are float64 with the bias as their last column."""
    maps = linears_of(inputs.layers)
    sizes = [size for each in maps for size in _sizes(each)]
    total = sum(math.prod(_sizes(each)) for each in maps)
    rank = torch.zeros(sum(sizes), device=inputs.dense.device)
    bound = -math.inf

    def above(bound: float) -> list[Pair]:
        """Masks of the columns and rows of each map whose ranks are above the bound."""
        stays = torch.split(rank > bound, sizes)
        return list(zip(stays[::2], stays[1::2], strict=True))

    def left(bound: float) -> list[list[int]]:
        return [[int(stays.sum()) for stays in pair] for pair in above(bound)]

    def removed(bound: float) -> int:
        return total - sum(map(math.prod, left(bound)))

    shots = SHOTS if inputs.excess > 0 else 0
    for shot in range(shots):
        factors = curvature(inputs)
        costs = list[Tensor]()
        for each, pair, (columns_I, rows_O) in zip(maps, factors, above(bound), strict=True):
            column_I, row_O = costs_of(*_in_float64(each, pair))
            column_I[each.in_features :] = math.inf  # the bias is never removed
            costs += [column_I.where(columns_I, -math.inf), row_O.where(rows_O, -math.inf)]
        # Many cost nothing, such as a gate's row for a neuron that nothing reads any more. Ranks,
        # with removed ones first, let them go one by one within the budget.
        cost = torch.cat(costs)
        rank = cost.argsort(stable=True).argsort().double().where(cost < math.inf, math.inf)
        bound = threshold([rank], removed, inputs.excess * (shot + 1) // SHOTS)
        for each, pair, kept in zip(maps, factors, above(bound), strict=True):
            columns_I, rows_O = kept
            new_OI = updated(*_in_float64(each, pair), kept) * columns_I * rows_O[:, None]
            _set_weights(each, new_OI)
        inputs.on_progress(shot + 1, SHOTS)
    return Pruned(removed(bound), {"columns_and_rows": left(bound)})


def require_memory(dense: DenseModel, device: torch.device) -> None:
    """Raise a `UserError` if the device cannot hold the factors of the model."""
    maps = linears_of(dense.family.layers(dense.model))
    sizes = [size for each in maps for size in _sizes(each)]
    # All factors, three float64 copies of the largest, and the model.
    weights = sum(each.nbytes for each in dense.model.parameters())
    needed = 4 * sum(size**2 for size in sizes) + 24 * max(sizes) ** 2 + weights
    held = memory_of(device)
    if needed > held:
        raise UserError(
            f"k_obd and llm_surgeon need {in_bytes(needed)} for this model's curvature, but the "
            f"device has {in_bytes(held)} of memory. Leave them out, or choose a larger machine."
        )


def curvature(inputs: PruneInputs) -> list[Pair]:
    """Factors A and G of all maps of the decoder layers, float32, by one backward pass a window."""
    sums = dict[nn.Linear, Pair]()
    for each in linears_of(inputs.layers):
        reads_II, slopes_OO = (torch.zeros(n, n, device=inputs.dense.device) for n in _sizes(each))
        sums[each] = reads_II, slopes_OO

    def see(linear: Any, arguments: tuple[Tensor, ...], output: Any) -> None:
        output.register_hook(partial(add, linear, arguments[0].detach()))

    def add(linear: nn.Linear, x: Tensor, slope: Tensor) -> None:
        x = F.pad(x, (0, int(linear.bias is not None)), value=1.0)
        for moment, values in zip(sums[linear], (x, slope), strict=True):
            values_TX = values.flatten(0, -2).float()
            moment.addmm_(values_TX.T, values_TX)

    model: Any = inputs.dense.model
    with ExitStack() as work:
        work.callback(model.disable_input_require_grads)
        model.enable_input_require_grads()
        for each in sums:
            work.enter_context(each.register_forward_hook(see))
        backward(replace(inputs, on_progress=no_update), rows=1, of_weights=False)
    return list(sums.values())


def _sizes(linear: nn.Linear) -> tuple[int, int]:
    """Numbers of columns, including the bias, and of rows."""
    columns = linear.in_features if linear.bias is None else linear.in_features + 1
    return columns, linear.out_features


def _set_weights(linear: nn.Linear, weight_OI: Tensor) -> None:
    """Replace a map's weight, and its bias by the last column."""
    linear.weight.copy_(weight_OI[:, : linear.in_features])
    if linear.bias is not None:
        linear.bias.copy_(weight_OI[:, -1])


def _in_float64(linear: nn.Linear, factors: Pair) -> tuple[Tensor, Pair]:
    """A map's weight with the bias as its last column, and its factors, in float64."""
    parts = [linear.weight] if linear.bias is None else [linear.weight, linear.bias[:, None]]
    return torch.cat(parts, dim=1).double(), (factors[0].double(), factors[1].double())
