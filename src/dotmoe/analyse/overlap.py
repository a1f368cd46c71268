"""Whether two layers send the same tokens the same ways, whatever their experts are called."""

from itertools import combinations
from statistics import mean
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from dotmoe.analyse.routing import chosen_mask
from dotmoe.analyse.run import AnalysedRun


def values(run: AnalysedRun) -> dict[str, Any]:
    """`matched_overlap` of each pair of split layers, 1 on the diagonal; needs SciPy."""
    routes, size = run.routes, len(run.routes.layers)
    similarity_LL = np.eye(size)
    for a, b in combinations(range(size), 2):
        chosen = routes.chosen_LTK[a], routes.chosen_LTK[b]
        similarity_LL[a, b] = similarity_LL[b, a] = matched_overlap(*chosen, routes.num_experts)
    return {"layers": list(routes.layers), "similarity_LL": similarity_LL.tolist()}


def matched_overlap(a_TK: Int[Tensor, "T K"], b_TK: Int[Tensor, "T K"], num_experts: int) -> float:
    """Share of a token's experts in one layer whose partners run in the other, above chance.

    Expert numbers of two layers have nothing to do with each other, so experts are first paired:
    one to one, such that partners run for the same tokens as often as possible. Pairs are found on
    one half of the text and the share is measured on the other, and again the other way round;
    otherwise the pairing would find likeness in noise. With `o` the share and `c` what layers with
    these loads would share if each routed on its own,

        overlap = (o - c) / (1 - c)

    Returns:
        1: the same routing under other names. 0: layers that know nothing of each other; noise
        goes a little below. Symmetric in the layers. 1 where k = E.
    """
    if a_TK.shape[1] == num_experts:
        return 1.0
    half = len(a_TK) // 2
    first, second = (
        (chosen_mask(a_TK[part], num_experts), chosen_mask(b_TK[part], num_experts))
        for part in (slice(0, half), slice(half, None))
    )
    return (_overlap(*first, *second) + _overlap(*second, *first)) / 2


def _overlap(
    paired_a_TE: Float[Tensor, "T E"],
    paired_b_TE: Float[Tensor, "T E"],
    a_TE: Float[Tensor, "T E"],
    b_TE: Float[Tensor, "T E"],
) -> float:
    """Overlap on one text under the pairing of another."""
    from scipy.optimize import linear_sum_assignment  # an extra

    rows, columns = linear_sum_assignment((paired_a_TE.T @ paired_b_TE).numpy(), maximize=True)
    active = float(a_TE.sum(dim=1).mean())
    both = (a_TE[:, rows] * b_TE[:, columns]).double()
    share = float(both.sum(dim=1).mean()) / active
    loads = a_TE.double().mean(dim=0)[rows] * b_TE.double().mean(dim=0)[columns]
    chance = float(loads.sum()) / active
    return (share - chance) / (1 - chance) if chance < 1 else 1.0


def says(values: dict[str, Any]) -> list[str]:
    """How much of their routing two layers share."""
    layers, table = values["layers"], values["similarity_LL"]
    similar = {(a, b): table[a][b] for a, b in combinations(range(len(layers)), 2)}
    if not similar:
        return ["one split layer, so there is nothing to compare"]
    a, b = max(similar, key=lambda pair: similar[pair])
    return [
        f"routing above chance shared by two layers: mean {mean(similar.values()):.3f}, most "
        f"{similar[a, b]:.3f} (layers {layers[a]} and {layers[b]})"
    ]
