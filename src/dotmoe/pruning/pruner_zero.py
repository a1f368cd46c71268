"""Pruner-Zero: weights that are small, and that the loss turns on least; found by genetic search.

The published metric in its 2:4 form: of each four, the two of smallest w^2 (g - min g) go, with g
the root of the sum over windows of (dl/dw)^2, l the next-token loss of one window in the dense
model, and min g the least g of the matrix. What the maps read does not enter. The published code
takes 128 windows; here all windows of the calibration text are read.
"""

import torch

from dotmoe.pruning.contract import Pruned, PruneInputs
from dotmoe.pruning.llm_pruner import backward
from dotmoe.pruning.two_of_four import halved, kept_of_four, linears_of


def pruner_zero_2_4(inputs: PruneInputs) -> Pruned:
    """Prune every linear map by weight and slope."""
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
    return halved(inputs)
