"""Wanda: weights that are small times what they multiply; no weight changes but to zero.

The published method in its 2:4 form: of each four, the two of smallest |W_ij| ||x_j||, with the
norm of input feature j over all calibration tokens, behind layers that are pruned already. Here
norms are summed in float64, and of equal scores the first go.
"""

from dotmoe.pruning.contract import Pruned, PruneInputs
from dotmoe.pruning.two_of_four import kept_of_four, prune_linears


def wanda_2_4(inputs: PruneInputs) -> Pruned:
    """Prune every linear map by weight times input."""
    return prune_linears(
        inputs,
        moment=lambda x_TI: x_TI.square().sum(dim=0),
        prepare=lambda square_I: square_I.sqrt(),
        pruned=lambda weight_OI, norm_I: weight_OI * kept_of_four(weight_OI.abs() * norm_I),
    )
