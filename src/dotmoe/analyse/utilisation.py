"""How evenly tokens use the experts of a layer (fig:expert_utilization); when that is collapse."""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dotmoe.analyse.run import AnalysedRun
from dotmoe.granularity import parts_of
from dotmoe.layout import ExpertLayout

UNEVEN_SHARE_OF_LIMIT = 0.5
"""A load is uneven where its coefficient of variation is above this share of the largest one."""


def values(run: AnalysedRun) -> dict[str, Any]:
    """Share of the tokens that run each expert, which sum to k; figures of each layer; warnings.

    Where both targets are split, those of attention besides, as `attention`.
    """
    first, *rest = (_values(run, part) for part in parts_of(run.layout))
    return first | ({"attention": rest[0]} if rest else {})


def _values(run: AnalysedRun, layout: ExpertLayout) -> dict[str, Any]:
    num_experts, shares = layout.num_experts, {}
    for layer, chosen_TK in zip(run.layers, run.routes[layout.target], strict=True):
        counts_E = torch.bincount(chosen_TK.flatten().long(), minlength=num_experts)
        shares[layer] = counts_E.double() / len(chosen_TK)
    return {
        "layers": list(shares),
        "share_LE": [share_E.tolist() for share_E in shares.values()],
        "num_experts": num_experts,
        "active_experts": layout.active_experts,
        "target": layout.target,
        "statistics": [{"layer": layer} | load_statistics(s) for layer, s in shares.items()],
        "warnings": [line for layer, s in shares.items() for line in warnings_of(layer, s)],
    }


def load_statistics(share_E: Float[Tensor, " E"]) -> dict[str, Any]:
    """The load of one layer in a few figures, from the share of the tokens that run each expert.

    Returns:
        `coefficient_of_variation`: standard deviation over experts / mean; 0 is even, and
        `sqrt(E / k - 1)`, the largest, means the same k experts for every token. `max_over_mean`,
        `min_over_mean`. `dead_experts`: below 1 % of the mean. `always_on_experts`: above 95 % of
        the tokens, where the mean is below 75 %; at k / E near 1 it is what must happen.
        `entropy_normalised`: entropy of the load / ln E, 1 is even.
    """
    mean = float(share_E.mean())
    portion_E = share_E / share_E.sum()
    entropy = -float(torch.xlogy(portion_E, portion_E).sum())
    always = (share_E > 0.95).nonzero().flatten().tolist()
    return {
        "coefficient_of_variation": float(share_E.std(correction=0)) / mean,
        "max_over_mean": float(share_E.max()) / mean,
        "min_over_mean": float(share_E.min()) / mean,
        "dead_experts": (share_E < 0.01 * mean).nonzero().flatten().tolist(),
        "always_on_experts": always if mean < 0.75 else [],
        "entropy_normalised": entropy / math.log(len(share_E)),
    }


def warnings_of(layer: int, share_E: Float[Tensor, " E"]) -> list[str]:
    """A line for each rule that a layer breaks: dead, always on, variation above half its limit."""
    found, lines = load_statistics(share_E), []
    rules = {
        "dead_experts": "are dead, run for less than 1 % of the mean load",
        "always_on_experts": "run for more than 95 % of the tokens, so they route nothing",
    }
    for name, wrong in rules.items():
        if experts := found[name]:
            shown = ", ".join(map(str, experts[:8])) + ", ..." * (len(experts) > 8)
            of = f"{len(experts)} of {len(share_E)} experts"
            lines.append(f"layer {layer}: {of} {wrong}: {shown}")
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
    heads = "of heads: " * (values.get("target") == "attention")
    found = [heads + line, *(f"warning: {heads}{warning}" for warning in values["warnings"])]
    return found + (says(values["attention"]) if "attention" in values else [])
