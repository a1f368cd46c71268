"""Whether two layers send the same tokens the same ways, whatever their experts are called."""

from itertools import combinations
from statistics import mean
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot

from dotmoe.analyse.run import AnalysedRun


def values(run: AnalysedRun) -> dict[str, Any]:
    """`matched_overlap` of each pair of split layers, 1 on the diagonal; needs SciPy.

    Where both targets are split, of FFNs.
    """
    chosen_LTK, E = run.routes[run.layout.target], run.layout.num_experts
    similarity_LL = np.eye(len(chosen_LTK))
    for a, b in combinations(range(len(chosen_LTK)), 2):
        overlap = matched_overlap(chosen_LTK[a], chosen_LTK[b], E)
        similarity_LL[a, b] = similarity_LL[b, a] = overlap
    return {"layers": list(run.layers), "similarity_LL": similarity_LL.tolist()}


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
    masks = [one_hot(each.long(), num_experts).sum(dim=1).double() for each in (a_TK, b_TK)]
    first, second = ([mask[part] for mask in masks] for part in (slice(half), slice(half, None)))
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
    a_TE, b_TE = a_TE[:, rows], b_TE[:, columns]
    active = float(a_TE.sum(dim=1).mean())
    share = float((a_TE * b_TE).sum(dim=1).mean()) / active
    chance = float(torch.dot(a_TE.mean(dim=0), b_TE.mean(dim=0))) / active
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
