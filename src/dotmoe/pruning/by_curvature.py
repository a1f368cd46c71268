"""Rows and columns of single matrices that the loss turns on least: K-OBD and LLM Surgeon.

The curvature of the loss at a linear map W is taken as the Kronecker product of two sums over
tokens: A of x x^T, with a 1 behind x for a bias, and G of g g^T, where g is the slope of a window's
mean next-token loss at the map's output. Rows and columns of all maps of the decoder layers, each
map on its own, go below one threshold of cost, the highest within the budget, in 40 shots of equal
size; before each the curvature is that of the model as it is then. Parameters are counted as if
every map were cut; the checkpoint holds zeros.

K-OBD (optimal brain damage) is the control of the LLM Surgeon's authors: row r costs
w_r A w_r^T G_rr / 2, column c w_c^T G w_c A_cc / 2, and nothing changes but to zero. LLM Surgeon
(optimal brain surgeon), without its interleaved low-rank training, damps both factors by 1 % of
their mean diagonal: row r costs w_r A w_r^T / [G^-1]_rr / 2, column c w_c^T G w_c / [A^-1]_cc / 2.
The best change of the rest under G x A is, for columns, the least-squares fit of what the others
read, and for rows the same with G; both are taken from the same weight, and added.
"""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dotmoe.distributed import memory_of
from dotmoe.errors import UserError
from dotmoe.models.family import DenseModel
from dotmoe.progress import no_update
from dotmoe.pruning.contract import (
    Pruned,
    PruneInputs,
    backward,
    damped_inverse,
    linears_of,
    made_up,
    threshold,
)
from dotmoe.tables import in_bytes, in_time

SHOTS = 40

Pair = tuple[Tensor, Tensor]
"""Of what a map reads and of what it writes, in this order: factors A and G, costs, what stays."""


def k_obd(inputs: PruneInputs) -> Pruned:
    """Remove rows and columns by their own curvature."""
    return _in_shots(inputs, damage, lambda weight_OI, factors, kept: weight_OI)


def damage(weight_OI: Tensor, factors: Pair) -> Pair:
    """Costs of columns and rows where nothing makes up for them."""
    column_I, row_O = _quadratics(weight_OI, factors)
    return column_I * factors[0].diagonal() / 2, row_O * factors[1].diagonal() / 2


def llm_surgeon(inputs: PruneInputs) -> Pruned:
    """Remove rows and columns by what the loss would be behind the best change of the rest."""
    return _in_shots(inputs, damage_left, moved)


def damage_left(weight_OI: Tensor, factors: Pair) -> Pair:
    """Costs of columns and rows behind the best change of the rest."""
    inverse_I, inverse_O = (damped_inverse(factor).diagonal() for factor in factors)
    column_I, row_O = _quadratics(weight_OI, factors)
    return column_I / inverse_I / 2, row_O / inverse_O / 2


def moved(weight_OI: Tensor, factors: Pair, kept: Pair) -> Tensor:
    """The weight whose kept columns and rows make up for the others."""
    by_columns_OI = made_up(weight_OI, factors[0], kept[0])
    return by_columns_OI + made_up(weight_OI.T, factors[1], kept[1]).T - weight_OI


def _quadratics(weight_OI: Tensor, factors: Pair) -> Pair:
    """w_c^T G w_c of each column and w_r A w_r^T of each row."""
    reads_II, slopes_OO = factors
    return (slopes_OO @ weight_OI * weight_OI).sum(0), (weight_OI @ reads_II * weight_OI).sum(1)


def _in_shots(
    inputs: PruneInputs,
    costs_of: Callable[[Tensor, Pair], Pair],
    updated: Callable[[Tensor, Pair, Pair], Tensor],
) -> Pruned:
    """Remove rows and columns by their costs; weights have the bias as last column, in float64."""
    maps = linears_of(inputs.layers)
    sizes = [size for each in maps for size in _sizes(each)]
    total = sum(math.prod(_sizes(each)) for each in maps)
    rank, bound = torch.zeros(sum(sizes), device=inputs.dense.device), -math.inf

    def above(bound: float) -> list[Pair]:
        """Which columns and rows of each map have a rank above."""
        stays = torch.split(rank > bound, sizes)
        return list(zip(stays[::2], stays[1::2], strict=True))

    def left(bound: float) -> list[list[int]]:
        return [[int(stays.sum()) for stays in pair] for pair in above(bound)]

    def removed(bound: float) -> int:
        return total - sum(map(math.prod, left(bound)))

    if inputs.excess > 0:
        inputs.log(_estimate(inputs, costs_of))
    for shot in range(SHOTS if inputs.excess > 0 else 0):
        factors, costs = curvature(inputs), list[Tensor]()
        for each, pair, (columns_I, rows_O) in zip(maps, factors, above(bound), strict=True):
            column_I, row_O = costs_of(*_in_float64(each, pair))
            column_I[each.in_features :] = math.inf  # the bias is no column of its own
            costs += [column_I.where(columns_I, -math.inf), row_O.where(rows_O, -math.inf)]
        # Many cost nothing, such as a gate's row for a neuron that nothing reads any more. By their
        # places in the order, first those that are gone, they go one by one within the budget.
        cost = torch.cat(costs)
        rank = cost.argsort(stable=True).argsort().double().where(cost < math.inf, math.inf)
        bound = threshold([rank], removed, inputs.excess * (shot + 1) // SHOTS)
        for each, pair, kept in zip(maps, factors, above(bound), strict=True):
            columns_I, rows_O = kept
            new_OI = updated(*_in_float64(each, pair), kept) * columns_I * rows_O[:, None]
            each.weight.copy_(new_OI[:, : each.in_features])
            if each.bias is not None:
                each.bias.copy_(new_OI[:, -1])
        inputs.on_progress(shot + 1, SHOTS)
    return Pruned(removed(bound), {"columns_and_rows": left(bound)})


def _estimate(inputs: PruneInputs, costs_of: Callable[[Tensor, Pair], Pair]) -> str:
    """What all shots take, from one window and the costs by it; an update takes as long."""
    times, windows = [time.monotonic()], inputs.tokens_BT
    factors = curvature(replace(inputs, tokens_BT=windows[:1]))
    times.append(time.monotonic())
    for each, pair in zip(linears_of(inputs.layers), factors, strict=True):
        costs_of(*_in_float64(each, pair))
    times.append(time.monotonic())
    seconds = SHOTS * (len(windows) * (times[1] - times[0]) + 2 * (times[2] - times[1]))
    work = f"{SHOTS} times the curvature of {windows.numel():,} tokens"
    return f"{work}, about {in_time(seconds / 3_600)}"


def require_memory(dense: DenseModel, device: torch.device) -> None:
    """Refuse a model whose factors the device cannot hold."""
    maps = linears_of(dense.family.layers(dense.model))
    sizes = [size for each in maps for size in _sizes(each)]
    # All factors, one in float64 three times over, and the model.
    weights = sum(each.nbytes for each in dense.model.parameters())
    needed = 4 * sum(size**2 for size in sizes) + 24 * max(sizes) ** 2 + weights
    held = memory_of(device)
    if needed > held:
        raise UserError(
            f"k_obd and llm_surgeon need {in_bytes(needed)} for the curvature of this model, and "
            f"there are {in_bytes(held)} of memory. Leave them out, or choose a larger machine."
        )


def curvature(inputs: PruneInputs) -> list[Pair]:
    """A and G of all maps of the decoder layers, in float32, by one backward pass a window."""
    sums = dict[nn.Linear, Pair]()
    for each in linears_of(inputs.layers):
        reads, writes = (torch.zeros(n, n, device=inputs.dense.device) for n in _sizes(each))
        sums[each] = reads, writes

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
    """Columns, that of the bias among them, and rows."""
    return linear.in_features + (linear.bias is not None), linear.out_features


def _in_float64(linear: nn.Linear, factors: Pair) -> tuple[Tensor, Pair]:
    """A map's weight with the bias as its last column, and its factors."""
    parts = [linear.weight] if linear.bias is None else [linear.weight, linear.bias[:, None]]
    return torch.cat(parts, dim=1).double(), (factors[0].double(), factors[1].double())
