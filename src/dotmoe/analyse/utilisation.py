"""How evenly tokens use the experts of a layer (fig:expert_utilization); when that is collapse."""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dotmoe.analyse.run import AnalysedRun

DEAD_SHARE_OF_MEAN = 0.01
"""An expert is dead where fewer tokens run it than this share of the layer's mean, k / E."""
ALWAYS_ON_SHARE = 0.95
"""An expert runs as good as always where more tokens than this run it ..."""
ALWAYS_ON_IS_RARE_BELOW = 0.75
"""... in a layer whose mean is below this: at k / E near 1 it is what must happen."""
UNEVEN_SHARE_OF_LIMIT = 0.5
"""A load is uneven where its coefficient of variation is above this share of the largest one."""


def values(run: AnalysedRun) -> dict[str, Any]:
    """Load of every expert of every split layer, figures of each layer, and warnings."""
    routes = run.routes
    shares = [load_shares(chosen_TK, routes.num_experts) for chosen_TK in routes.chosen_LTK]
    by_layer = list(zip(routes.layers, shares, strict=True))
    return {
        "layers": list(routes.layers),
        "share_LE": [share_E.tolist() for share_E in shares],
        "num_experts": routes.num_experts,
        "active_experts": routes.chosen_LTK.shape[2],
        "statistics": [{"layer": layer} | load_statistics(share_E) for layer, share_E in by_layer],
        "warnings": [line for found in by_layer for line in warnings_of(*found)],
    }


def load_shares(chosen_TK: Int[Tensor, "T K"], num_experts: int) -> Float[Tensor, " E"]:
    """Share of the tokens that run each expert, float64; sums to k."""
    counts_E = torch.bincount(chosen_TK.flatten().long(), minlength=num_experts)
    return counts_E.double() / len(chosen_TK)


def load_statistics(share_E: Float[Tensor, " E"]) -> dict[str, Any]:
    """The load of one layer in a few figures, from the share of the tokens that run each expert.

    Returns:
        `coefficient_of_variation`: standard deviation over experts / mean; 0 is even, and
        `sqrt(E / k - 1)`, the largest, means the same k experts for every token. `max_over_mean`,
        `min_over_mean`. `dead_experts`: below 1 % of the mean. `always_on_experts`: above 95 % of
        the tokens, where the mean is below 75 %. `entropy_normalised`: entropy of the load / ln E,
        1 is even.
    """
    mean = float(share_E.mean())
    portion_E = share_E / share_E.sum()
    dead = (share_E < DEAD_SHARE_OF_MEAN * mean).nonzero().flatten()
    always = (share_E > ALWAYS_ON_SHARE).nonzero().flatten()
    return {
        "coefficient_of_variation": float(share_E.std(correction=0)) / mean,
        "max_over_mean": float(share_E.max()) / mean,
        "min_over_mean": float(share_E.min()) / mean,
        "dead_experts": dead.tolist(),
        "always_on_experts": always.tolist() if mean < ALWAYS_ON_IS_RARE_BELOW else [],
        "entropy_normalised": -float(torch.xlogy(portion_E, portion_E).sum())
        / math.log(len(share_E)),
    }


def warnings_of(layer: int, share_E: Float[Tensor, " E"]) -> list[str]:
    """What is wrong with the load of a layer, a line each; none where nothing is.

    - Dead experts: a load below 1 % of the mean.
    - Experts that run for more than 95 % of the tokens, where the mean is below 75 %.
    - An uneven load: a coefficient of variation above half the largest there is. That one,
      `sqrt(E / k - 1)`, is reached where every token has the same k experts.
    """
    found = load_statistics(share_E)
    dead, always = found["dead_experts"], found["always_on_experts"]
    lines = []
    if dead:
        lines.append(
            f"layer {layer}: {len(dead)} of {len(share_E)} experts are dead, run for less than 1 % "
            f"of the mean load: {_listed(dead)}"
        )
    if always:
        lines.append(
            f"layer {layer}: {len(always)} of {len(share_E)} experts run for more than 95 % of the "
            f"tokens, so they route nothing: {_listed(always)}"
        )
    limit = math.sqrt(max(0.0, 1 / float(share_E.mean()) - 1))
    if found["coefficient_of_variation"] > UNEVEN_SHARE_OF_LIMIT * limit > 0:
        lines.append(
            f"layer {layer}: the load is uneven, with a coefficient of variation of "
            f"{found['coefficient_of_variation']:.2f}; the same experts for every token would have "
            f"{limit:.2f}"
        )
    return lines


def says(values: dict[str, Any]) -> list[str]:
    """The spread of the load, and each warning."""
    layers = values["statistics"]
    spread = [layer["coefficient_of_variation"] for layer in layers]
    line = (
        f"coefficient of variation of the load {min(spread):.2f} to {max(spread):.2f} by layer; "
        f"busiest expert {max(layer['max_over_mean'] for layer in layers):.2f} times its layer's "
        f"mean, idlest {min(layer['min_over_mean'] for layer in layers):.2f}; "
        f"{sum(len(layer['dead_experts']) for layer in layers)} dead"
    )
    return [line, *(f"warning: {warning}" for warning in values["warnings"])]


def _listed(experts: list[int], most: int = 8) -> str:
    shown = ", ".join(map(str, experts[:most]))
    return shown if len(experts) <= most else f"{shown}, ..."
