"""Whether two layers send the same tokens the same ways, whatever their experts are called."""

from itertools import combinations
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from dotmoe.analysis.routing import Routes, chosen_mask

Floats = NDArray[np.float64]


def routing_overlap(routes: Routes, seed: int = 0) -> dict[str, Any]:
    """Similarity of the routing of each pair of split layers; needs SciPy.

    Returns:
        `similarity_LL`: see `matched_overlap`; 1 on the diagonal.
        `top1_nmi_LL`: `normalised_mutual_information` of each token's first expert.
        `top1_nmi_shuffled`: the same of layers whose tokens were shuffled, mean over pairs. Finite
        text gives more than 0 to layers that have nothing in common, and this is how much.
    """
    size = len(routes.layers)
    similarity_LL, nmi_LL = np.eye(size), np.eye(size)
    generator = torch.Generator().manual_seed(seed)
    order_T = torch.randperm(routes.num_tokens, generator=generator)
    shuffled = []
    first_LT = routes.chosen_LTK[:, :, 0].numpy()
    for a, b in combinations(range(size), 2):
        chosen = routes.chosen_LTK[a], routes.chosen_LTK[b]
        similarity_LL[a, b] = similarity_LL[b, a] = matched_overlap(*chosen, routes.num_experts)
        nmi = normalised_mutual_information(first_LT[a], first_LT[b])
        nmi_LL[a, b] = nmi_LL[b, a] = nmi
        shuffled.append(normalised_mutual_information(first_LT[a], first_LT[b][order_T.numpy()]))
    return {
        "layers": list(routes.layers),
        "similarity_LL": similarity_LL.tolist(),
        "top1_nmi_LL": nmi_LL.tolist(),
        "top1_nmi_shuffled": float(np.mean(shuffled)) if shuffled else None,
    }


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
    parts = [
        (chosen_mask(a_TK[part], num_experts), chosen_mask(b_TK[part], num_experts))
        for part in (slice(0, half), slice(half, None))
    ]
    return float(np.mean([_overlap(*parts[0], *parts[1]), _overlap(*parts[1], *parts[0])]))


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


def normalised_mutual_information(a_T: NDArray[Any], b_T: NDArray[Any]) -> float:
    """Mutual information of two labellings over the mean of their entropies, 0 to 1.

    It does not depend on how labels are called. Two labellings with one label each are alike: 1.
    """
    counts = np.zeros((int(a_T.max()) + 1, int(b_T.max()) + 1))
    np.add.at(counts, (a_T, b_T), 1.0)
    joint = counts / len(a_T)
    a, b = joint.sum(axis=1), joint.sum(axis=0)
    entropies = _entropy(a) + _entropy(b)
    if entropies == 0:
        return 1.0
    return max(0.0, 2 * (entropies - _entropy(joint.ravel())) / entropies)


def _entropy(probability: Floats) -> float:
    """In nats."""
    present = probability[probability > 0]
    return -float((present * np.log(present)).sum())
