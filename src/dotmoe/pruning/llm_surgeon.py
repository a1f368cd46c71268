"""LLM Surgeon: rows and columns of single matrices go, and those that stay make up for them.

The published method without its interleaved low-rank training. Curvature, shots and threshold are
those of K-OBD; both factors are damped by 1 % of their mean diagonal. To remove row r costs
w_r A w_r^T / [G^-1]_rr / 2, column c w_c^T G w_c / [A^-1]_cc / 2 (optimal brain surgeon). The best
change of the rest under G x A is, for columns, the least-squares fit of what the others read, and
for rows the same with G; both are taken from the same weight, and added.
"""

from torch import Tensor

from dotmoe.pruning.contract import Pruned, PruneInputs
from dotmoe.pruning.k_obd import Pair, in_shots, quadratics
from dotmoe.pruning.sparsegpt import damped_inverse, made_up


def llm_surgeon(inputs: PruneInputs) -> Pruned:
    """Remove rows and columns by what the loss would be behind the best change of the rest."""
    return in_shots(inputs, _costs, _updated)


def _costs(weight_OI: Tensor, factors: Pair) -> Pair:
    inverse_I, inverse_O = (damped_inverse(factor).diagonal() for factor in factors)
    column_I, row_O = quadratics(weight_OI, factors)
    return column_I / inverse_I / 2, row_O / inverse_O / 2


def _updated(weight_OI: Tensor, factors: Pair, kept: Pair) -> Tensor:
    by_columns_OI = made_up(weight_OI, factors[0], kept[0])
    return by_columns_OI + made_up(weight_OI.T, factors[1], kept[1]).T - weight_OI
