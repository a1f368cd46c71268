"""Analyses of the experts: load and outputs."""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from dotmoe.common.errors import UserError, require_package
from dotmoe.common.tables import figure
from dotmoe.measure.analyse.run import AnalysedRun, Findings, router_inputs
from dotmoe.method.layout import ALWAYS_ON, ExpertLayout
from dotmoe.models.family import GatedFFN

UNEVEN_SHARE_OF_LIMIT = 0.5
"""A load is uneven if its coefficient of variation exceeds this share of the maximum possible."""
POINTS, EXPERTS_SHOWN, SEED = 1000, 16, 0
"""Approximate number of outputs for t-SNE, maximum number of experts, and seed of the sampling."""


def utilisation(run: AnalysedRun) -> Findings:
    """How evenly tokens use the experts of each layer (fig:expert_utilization).

    Values: share of the tokens that run each expert (sums to k), statistics by layer, warnings.
    If FFNs and attention are split, `attention` holds the same values for attention.
    """
    (values, sentences), *attention = (_load(run, layout) for layout in run.layouts)
    for of_heads, more in attention:
        values["attention"] = of_heads
        sentences += more
    return values, sentences


def _load(run: AnalysedRun, layout: ExpertLayout) -> Findings:
    loads = {}
    for layer, chosen_TK in zip(run.layers, run.routes[layout.target], strict=True):
        counts_E = torch.bincount(chosen_TK.flatten().long(), minlength=layout.num_experts)
        loads[layer] = counts_E.double() / len(chosen_TK)
    statistics = [{"layer": layer} | load_statistics(share_E) for layer, share_E in loads.items()]
    warnings = [line for layer, share_E in loads.items() for line in warnings_of(layer, share_E)]
    spread = [layer["coefficient_of_variation"] for layer in statistics]
    summary = (
        f"coefficient of variation of a layer's load: {min(spread):.2f} to {max(spread):.2f}; "
        f"busiest expert: {max(layer['max_over_mean'] for layer in statistics):.2f} times its "
        f"layer's mean load, idlest: {min(layer['min_over_mean'] for layer in statistics):.2f}; "
        f"dead experts: {sum(len(layer['dead_experts']) for layer in statistics)}"
    )
    heads = "query heads: " * (layout.target == "attention")
    return {
        "layers": list(loads),
        "share_LE": [share_E.tolist() for share_E in loads.values()],
        "num_experts": layout.num_experts,
        "active_experts": layout.active_experts,
        "target": layout.target,
        "statistics": statistics,
        "warnings": warnings,
    }, [heads + summary, *(f"warning: {heads}{warning}" for warning in warnings)]


def load_statistics(share_E: Float[Tensor, " E"]) -> dict[str, Any]:
    """Statistics of the load of one layer, from the share of the tokens that run each expert.

    Returns:
        `coefficient_of_variation`: standard deviation over experts / mean; 0 is even, and the
        maximum, `sqrt(E / k - 1)`, means the same k experts for every token. `dead_experts`: load
        below 1 % of the mean. `always_on_experts`: load above 95 %, only if the mean is below 75 %
        (with k / E near 1 such loads are unavoidable). `entropy_normalised`: 1 is even.
    """
    average = float(share_E.mean())
    portion_E = share_E / share_E.sum()
    entropy = -float(torch.xlogy(portion_E, portion_E).sum())
    always = (share_E > 0.95).nonzero().flatten().tolist()
    return {
        "coefficient_of_variation": float(share_E.std(correction=0)) / average,
        "max_over_mean": float(share_E.max()) / average,
        "min_over_mean": float(share_E.min()) / average,
        "dead_experts": (share_E < 0.01 * average).nonzero().flatten().tolist(),
        "always_on_experts": always if average < 0.75 else [],
        "entropy_normalised": entropy / math.log(len(share_E)) if len(share_E) > 1 else 1.0,
    }


def warnings_of(layer: int, share_E: Float[Tensor, " E"]) -> list[str]:
    """One line for each rule that a layer breaks: dead experts, always-on experts, uneven load."""
    statistics, lines = load_statistics(share_E), []
    rules = {
        "dead_experts": "are dead (less than 1 % of the mean load)",
        "always_on_experts": "run for more than 95 % of the tokens, so routing barely affects them",
    }
    for name, wrong in rules.items():
        if experts := statistics[name]:
            shown = ", ".join(map(str, experts[:8])) + ", ..." * (len(experts) > 8)
            of = f"{len(experts)} of {len(share_E)} experts"
            lines.append(f"layer {layer}: {of} {wrong}: {shown}")
    variation = statistics["coefficient_of_variation"]
    limit = math.sqrt(max(0.0, 1 / float(share_E.mean()) - 1))
    if variation > UNEVEN_SHARE_OF_LIMIT * limit > 0:
        lines.append(
            f"layer {layer}: the load is uneven: its coefficient of variation is {variation:.2f} "
            f"({limit:.2f} would mean the same experts for every token)"
        )
    return lines


def require_tsne(run: AnalysedRun) -> None:
    """Refuse a run without experts of neurons, or a missing scikit-learn."""
    require_package("sklearn", "analysis", "expert_outputs_tsne")
    if run.layout.target != "ffn":
        raise UserError(
            f"expert_outputs_tsne needs experts of neurons, but {run.asked.run} has none. Leave it "
            "out."
        )


@torch.no_grad()
def outputs_tsne(run: AnalysedRun) -> Findings:
    """Expert outputs in two dimensions by t-SNE, and how well they separate; needs scikit-learn.

    Experts write through different rows of W_down, so outputs of any split separate to some degree.
    The control is a random split of the same neurons, with the same metrics on the same tokens and
    expert numbers (fig:tsne_appendix).
    """
    from sklearn.decomposition import PCA  # an extra
    from sklearn.manifold import TSNE

    layout, layer = run.layout, run.layer
    generator = torch.Generator().manual_seed(SEED)
    chosen_TK = run.routes["ffn"][run.layers.index(layer)]
    token_P, expert_P = sampled_pairs(chosen_TK, POINTS, EXPERTS_SHOWN, generator)
    x_PD = router_inputs(run.dense, run.layouts, run.tokens, layer)[token_P].to(run.dense.device)
    ffn = run.dense.family.ffn(run.dense.family.layers(run.dense.model)[layer])
    own_N = layout.expert_of_neuron_LN[layer]
    is_routed_N, random_N = own_N != ALWAYS_ON, own_N.clone()
    order = torch.randperm(int(is_routed_N.sum()), generator=generator)
    random_N[is_routed_N] = own_N[is_routed_N][order]
    outputs, random_outputs = (
        sampled_outputs(x_PD, ffn, split_N, expert_P).numpy() for split_N in (own_N, random_N)
    )
    # More dimensions add noise to t-SNE and make it slow.
    reduced = PCA(min(50, *outputs.shape), random_state=SEED).fit_transform(outputs)
    perplexity = min(30.0, (len(outputs) - 1) / 3)
    tsne = TSNE(n_components=2, perplexity=perplexity, init="pca", random_state=SEED)
    own, random_split = (separation(each, expert_P.numpy()) for each in (outputs, random_outputs))
    shown = len(set(expert_P.tolist()))
    return {
        "layer": layer,
        "points": tsne.fit_transform(reduced).tolist(),
        "expert": expert_P.tolist(),
        "perplexity": perplexity,
        "experts_shown": shown,
        "num_experts": layout.num_experts,
        **own,
        "random_split": random_split,
    }, [
        f"layer {layer}, {len(outputs)} outputs of {shown} experts: silhouette "
        f"{figure(own['silhouette'], '.3f')}, nearest neighbour from the same expert "
        f"{100 * own['neighbour_agreement']:.0f} %; a random split of the same neurons: "
        f"{figure(random_split['silhouette'], '.3f')}, "
        f"{100 * random_split['neighbour_agreement']:.0f} %"
    ]


def sampled_pairs(
    chosen_TK: Int[Tensor, "T K"], points: int, shown: int, generator: torch.Generator
) -> tuple[Int[Tensor, " P"], Int[Tensor, " P"]]:
    """About `points` random token positions, and an expert that runs for each of them.

    Positions are divided equally over at most `shown` experts, evenly spaced among those with two
    or more tokens; with one token, an output would have no neighbour from its own expert.
    """
    used = (torch.bincount(chosen_TK.flatten().long()) >= 2).nonzero().flatten()
    places = torch.linspace(0, len(used) - 1, min(shown, len(used))).round().long()
    tokens, experts = [], []
    for expert in used[places].tolist():
        ran = (chosen_TK == expert).any(dim=1).nonzero().flatten()
        picked = ran[torch.randperm(len(ran), generator=generator)[: max(2, points // len(places))]]
        tokens.append(picked)
        experts.append(torch.full_like(picked, expert))
    return torch.cat(tokens), torch.cat(experts)


def sampled_outputs(
    x_PD: Float[Tensor, "P D"],
    ffn: GatedFFN,
    expert_of_neuron_N: Int[Tensor, " N"],
    expert_P: Int[Tensor, " P"],
) -> Float[Tensor, "P D"]:
    """Output of one expert for each input: its part of the sum in eq:moe_output; float32, CPU."""
    hidden_PN = ffn.hidden(x_PD)
    is_own_PN = (expert_of_neuron_N == expert_P[:, None]).to(hidden_PN.device)
    return F.linear(hidden_PN * is_own_PN, ffn.down.weight).float().cpu()


def separation(outputs: NDArray[Any], experts: NDArray[Any]) -> dict[str, Any]:
    """How well outputs separate by expert, in all their dimensions.

    Returns:
        `silhouette`: mean silhouette, -1 to 1; above 0 if outputs are nearer to those of their
        own expert than to any other's. None if there is only one expert.
        `neighbour_agreement`: share of outputs whose nearest neighbour is from the same expert.
        `neighbour_chance`: the same share for random neighbours.
    """
    from sklearn.metrics import silhouette_score  # an extra
    from sklearn.neighbors import NearestNeighbors

    _, counts = np.unique(experts, return_counts=True)
    nearest = NearestNeighbors(n_neighbors=1).fit(outputs).kneighbors(return_distance=False)[:, 0]
    total = len(experts)
    return {
        "silhouette": float(silhouette_score(outputs, experts)) if len(counts) > 1 else None,
        "neighbour_agreement": float((experts[nearest] == experts).mean()),
        "neighbour_chance": float((counts * (counts - 1)).sum() / (total * (total - 1))),
    }
