"""K-OBD: rows and columns of single matrices that the loss turns on least (optimal brain damage).

The control of the LLM Surgeon's authors. The curvature of the loss at a linear map W is taken as
the Kronecker product of two sums over tokens: A of x x^T, with a 1 behind x for a bias, and G of
g g^T, where g is the slope of a window's mean next-token loss at the map's output. To remove row r
costs w_r A w_r^T G_rr / 2, column c w_c^T G w_c A_cc / 2. Rows and columns of all maps of the
decoder layers, each map on its own, go below one threshold, the highest within the budget, in 40
shots of equal size; before each the curvature is that of the model as it is then. Nothing changes
but to zero. Parameters are counted as if every map were cut; the checkpoint holds zeros.
"""

import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dotmoe.errors import UserError
from dotmoe.models.dense import DenseModel
from dotmoe.progress import no_update
from dotmoe.pruning.contract import Pruned, PruneInputs, threshold
from dotmoe.pruning.llm_pruner import backward
from dotmoe.tables import in_bytes, in_time

SHOTS = 40

Pair = tuple[Tensor, Tensor]
"""Of what a map reads and of what it writes, in this order: factors A and G, costs, what stays."""


def k_obd(inputs: PruneInputs) -> Pruned:
    """Remove rows and columns by their own curvature."""
    return in_shots(inputs, _costs, lambda weight_OI, factors, kept: weight_OI)


def _costs(weight_OI: Tensor, factors: Pair) -> Pair:
    column_I, row_O = quadratics(weight_OI, factors)
    return column_I * factors[0].diagonal() / 2, row_O * factors[1].diagonal() / 2


def quadratics(weight_OI: Tensor, factors: Pair) -> Pair:
    """w_c^T G w_c of each column and w_r A w_r^T of each row."""
    reads_II, slopes_OO = factors
    return (slopes_OO @ weight_OI * weight_OI).sum(0), (weight_OI @ reads_II * weight_OI).sum(1)


def in_shots(
    inputs: PruneInputs,
    costs_of: Callable[[Tensor, Pair], Pair],
    updated: Callable[[Tensor, Pair, Pair], Tensor],
) -> Pruned:
    """Remove rows and columns by their costs; weights have the bias as last column, in float64."""
    maps = _maps(inputs.dense)
    kept = [(torch.ones(_reads(each)), torch.ones(each.out_features)) for each in maps]
    total = _parameters(kept)
    if inputs.excess > 0:
        inputs.log(_estimate(inputs, costs_of))
    for shot in range(SHOTS if inputs.excess > 0 else 0):
        factors = curvature(replace(inputs, on_progress=no_update))
        costs = []
        for each, pair in zip(maps, factors, strict=True):
            column_I, row_O = costs_of(*_in_float64(each, pair))
            column_I[each.in_features :] = math.inf  # the bias is no column of its own
            costs.append((column_I, row_O))
        ranks = _ranks(costs, kept)

        def above(bound: float, ranks: list[Pair] = ranks) -> list[Pair]:
            return [(columns_I > bound, rows_O > bound) for columns_I, rows_O in ranks]

        most = inputs.excess * (shot + 1) // SHOTS
        kept = above(threshold(sum(ranks, ()), lambda x: total - _parameters(above(x)), most))
        for each, pair, (columns_I, rows_O) in zip(maps, factors, kept, strict=True):
            new_OI = updated(*_in_float64(each, pair), (columns_I, rows_O))
            new_OI = new_OI * columns_I * rows_O[:, None]
            each.weight.copy_(new_OI[:, : each.in_features])
            if each.bias is not None:
                each.bias.copy_(new_OI[:, -1])
        inputs.on_progress(shot + 1, SHOTS)
    left = [[int(stays.sum()) for stays in pair] for pair in kept]
    return Pruned(total - _parameters(kept), {"columns_and_rows": left})


def _ranks(costs: list[Pair], kept: list[Pair]) -> list[Pair]:
    """Places of columns and rows by what they cost, those first that are gone already.

    Many cost nothing, such as a gate's row for a neuron that nothing reads any more; with places of
    their own they go one by one, as far as the budget reaches.
    """
    paired = zip(sum(costs, ()), sum(kept, ()), strict=True)
    cost = torch.cat([each.where(stays.to(each) > 0, -math.inf) for each, stays in paired])
    rank = cost.argsort(stable=True).argsort().double().where(cost < math.inf, math.inf)
    parts = iter(torch.split(rank, [len(each) for each in sum(costs, ())]))
    return list(zip(parts, parts, strict=True))


def require_memory(dense: DenseModel) -> None:
    """Refuse a model whose factors this machine cannot hold."""
    needed, held = _memory(dense), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if dense.device.type == "cuda" or (dense.device.type == "meta" and torch.cuda.is_available()):
        held = torch.cuda.mem_get_info()[1]
    if needed > held:
        raise UserError(
            f"k_obd and llm_surgeon need {in_bytes(needed)} for the curvature of this model, and "
            f"there are {in_bytes(held)} of memory. Leave them out, or choose a larger machine."
        )


def curvature(inputs: PruneInputs) -> list[Pair]:
    """A and G of all maps of the decoder layers, in float32, by one backward pass a window."""
    new = partial(torch.zeros, device=inputs.dense.device)
    sums = {
        each: [new(size, size) for size in (_reads(each), each.out_features)]
        for each in _maps(inputs.dense)
    }

    def see(linear: Any, arguments: tuple[Tensor, ...], output: Any) -> None:
        output.register_hook(partial(add, linear, arguments[0].detach()))

    def add(linear: nn.Linear, x: Tensor, slope: Tensor) -> None:
        x = F.pad(x, (0, _reads(linear) - linear.in_features), value=1.0)
        for moment, values in zip(sums[linear], (x, slope), strict=True):
            values_TX = values.flatten(0, -2).float()
            moment.addmm_(values_TX.T, values_TX)

    model: Any = inputs.dense.model
    with ExitStack() as work:
        work.callback(model.disable_input_require_grads)
        model.enable_input_require_grads()
        for each in sums:
            work.enter_context(each.register_forward_hook(see))
        backward(inputs, rows=1, of_weights=False)
    return [(reads_II, slopes_OO) for reads_II, slopes_OO in sums.values()]


def _maps(dense: DenseModel) -> list[nn.Linear]:
    layers = dense.family.layers(dense.model)
    return [each for each in layers.modules() if isinstance(each, nn.Linear)]


def _reads(linear: nn.Linear) -> int:
    """Columns, that of the bias among them."""
    return linear.in_features + (linear.bias is not None)


def _parameters(kept: list[Pair]) -> int:
    return sum(int(columns_I.sum()) * int(rows_O.sum()) for columns_I, rows_O in kept)


def _in_float64(linear: nn.Linear, factors: Pair) -> tuple[Tensor, Pair]:
    """A map's weight with the bias as its last column, and its factors."""
    parts = [linear.weight] if linear.bias is None else [linear.weight, linear.bias[:, None]]
    return torch.cat(parts, dim=1).double(), (factors[0].double(), factors[1].double())


def _memory(dense: DenseModel) -> int:
    """Bytes of all factors, of one in float64 three times over, and of the model."""
    sizes = [size for each in _maps(dense) for size in (each.in_features, each.out_features)]
    weights = sum(each.nbytes for each in dense.model.parameters())
    return 4 * sum(size**2 for size in sizes) + 24 * max(sizes) ** 2 + weights


def _estimate(inputs: PruneInputs, costs_of: Callable[[Tensor, Pair], Pair]) -> str:
    """What all shots take, from one window and the costs by it; an update takes as long."""
    times, windows = [time.monotonic()], inputs.tokens_BT
    factors = curvature(replace(inputs, tokens_BT=windows[:1], on_progress=no_update))
    times.append(time.monotonic())
    for each, pair in zip(_maps(inputs.dense), factors, strict=True):
        costs_of(*_in_float64(each, pair))
    times.append(time.monotonic())
    seconds = SHOTS * (len(windows) * (times[1] - times[0]) + 2 * (times[2] - times[1]))
    needs = f"{in_time(seconds / 3600)} and {in_bytes(_memory(inputs.dense))}"
    return f"{SHOTS} times the curvature of {windows.numel():,} tokens, about {needs}"
