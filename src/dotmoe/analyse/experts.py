"""What became of the experts: their load, layers that route alike, outputs, cost of each layer."""

import math
from itertools import combinations
from statistics import mean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from dotmoe.analyse.run import FORWARD_TOKENS, AnalysedRun, Findings, router_inputs
from dotmoe.evaluate.models import stock_nats
from dotmoe.granularity import parts_of
from dotmoe.layout import ALWAYS_ON, ExpertLayout
from dotmoe.models.family import GatedFFN
from dotmoe.moe.masked import masked, maskings_of
from dotmoe.tables import figure

UNEVEN_SHARE_OF_LIMIT = 0.5
"""A load is uneven where its coefficient of variation is above this share of the largest one."""
POINTS, EXPERTS_SHOWN, SEED = 1000, 16, 0
"""Expert outputs that t-SNE shows, about, of at most so many experts; seed of what is drawn."""


def utilisation(run: AnalysedRun) -> Findings:
    """How evenly tokens use the experts of a layer (fig:expert_utilization).

    Shares of the tokens that run each expert, which sum to k; figures of each layer; warnings.
    Where both targets are split, those of attention besides, as `attention`.
    """
    (values, sentences), *attention = (_load(run, part) for part in parts_of(run.layout))
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
        f"coefficient of variation of the load {min(spread):.2f} to {max(spread):.2f} by layer; "
        f"busiest expert {max(layer['max_over_mean'] for layer in statistics):.2f} times its "
        f"layer's mean, idlest {min(layer['min_over_mean'] for layer in statistics):.2f}; "
        f"{sum(len(layer['dead_experts']) for layer in statistics)} dead"
    )
    heads = "of heads: " * (layout.target == "attention")
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
    """The load of one layer in a few figures, from the share of the tokens that run each expert.

    Returns:
        `coefficient_of_variation`: standard deviation over experts / mean; 0 is even, and
        `sqrt(E / k - 1)`, the largest, means the same k experts for every token. `dead_experts`:
        below 1 % of the mean. `always_on_experts`: above 95 % of the tokens, where the mean is
        below 75 %; at k / E near 1 it is what must happen. `entropy_normalised`: 1 is even.
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
    """A line for each rule that a layer breaks: dead, always on, variation above half its limit."""
    statistics, lines = load_statistics(share_E), []
    rules = {
        "dead_experts": "are dead, run for less than 1 % of the mean load",
        "always_on_experts": "run for more than 95 % of the tokens, so they route nothing",
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
            f"layer {layer}: the load is uneven, with a coefficient of variation of "
            f"{variation:.2f}; the same experts for every token would have {limit:.2f}"
        )
    return lines


def overlap(run: AnalysedRun) -> Findings:
    """`matched_overlap` of each pair of split layers, 1 on the diagonal; needs SciPy.

    Where both targets are split, of FFNs.
    """
    chosen_LTK, layers = run.routes[run.layout.target], list(run.layers)
    similarity_LL, pairs = np.eye(len(layers)), list[tuple[float, str]]()
    for a, b in combinations(range(len(layers)), 2):
        shared = matched_overlap(chosen_LTK[a], chosen_LTK[b], run.layout.num_experts)
        similarity_LL[a, b] = similarity_LL[b, a] = shared
        pairs.append((shared, f"layers {layers[a]} and {layers[b]}"))
    values = {"layers": layers, "similarity_LL": similarity_LL.tolist()}
    if not pairs:
        return values, ["one split layer, so there is nothing to compare"]
    most, where = max(pairs)
    return values, [
        "routing above chance shared by two layers: mean "
        f"{mean(shared for shared, _ in pairs):.3f}, most {most:.3f} ({where})"
    ]


def matched_overlap(a_TK: Int[Tensor, "T K"], b_TK: Int[Tensor, "T K"], num_experts: int) -> float:
    """Share of a token's experts in one layer whose partners run in the other, above chance.

    Expert numbers of two layers have nothing to do with each other, so experts are first paired:
    one to one, such that partners run for the same tokens as often as possible. Pairs are found on
    one half of the text and the share is measured on the other, and again the other way round;
    otherwise the pairing would find likeness in noise. With `o` the share and `c` what layers with
    these loads would share if each routed on its own,

        overlap = (o - c) / (1 - c)

    Returns:
        1: the same routing under other names, or k = E. 0: layers that know nothing of each other;
        noise goes a little below. Symmetric in the layers.
    """
    from scipy.optimize import linear_sum_assignment  # an extra

    active, half, overlaps = a_TK.shape[1], len(a_TK) // 2, []
    if active == num_experts:
        return 1.0
    masks = [F.one_hot(each.long(), num_experts).sum(dim=1).double() for each in (a_TK, b_TK)]
    halves = [[mask[part] for mask in masks] for part in (slice(half), slice(half, None))]
    for (paired_a_TE, paired_b_TE), (a_TE, b_TE) in (halves, halves[::-1]):
        gain_EE = (paired_a_TE.T @ paired_b_TE).numpy()
        rows, columns = linear_sum_assignment(gain_EE, maximize=True)
        a_TE, b_TE = a_TE[:, rows], b_TE[:, columns]
        share = float((a_TE * b_TE).sum(dim=1).mean()) / active
        chance = float(torch.dot(a_TE.mean(dim=0), b_TE.mean(dim=0))) / active
        overlaps.append((share - chance) / (1 - chance) if chance < 1 else 1.0)
    return mean(overlaps)


@torch.no_grad()
def outputs_tsne(run: AnalysedRun) -> Findings:
    """Outputs of experts in two dimensions, and how well the experts are told apart (scikit-learn).

    Experts write through different rows of W_down, so that their outputs lie apart whatever the
    experts are. The same figures for a random split of the same neurons, on the same tokens and
    expert numbers, say how much of it that is (fig:tsne_appendix).
    """
    from sklearn.decomposition import PCA  # an extra
    from sklearn.manifold import TSNE

    layout, layer = run.layout, run.layer
    generator = torch.Generator().manual_seed(SEED)
    chosen_TK = run.routes["ffn"][run.layers.index(layer)]
    token_P, expert_P = sampled_pairs(chosen_TK, POINTS, EXPERTS_SHOWN, generator)
    x_PD = router_inputs(run.dense, layout, run.tokens, layer)[token_P].to(run.dense.device)
    ffn = run.dense.family.ffn(run.dense.family.layers(run.dense.model)[layer])
    own_N = layout.expert_of_neuron_LN[layer]
    is_routed_N, random_N = own_N != ALWAYS_ON, own_N.clone()
    order = torch.randperm(int(is_routed_N.sum()), generator=generator)
    random_N[is_routed_N] = own_N[is_routed_N][order]
    outputs, random_outputs = (
        sampled_outputs(x_PD, ffn, split_N, expert_P).numpy() for split_N in (own_N, random_N)
    )
    # More dimensions are noise to t-SNE, and slow.
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
        f"{figure(own['silhouette'], '.3f')}, nearest neighbour of the same expert "
        f"{100 * own['neighbour_agreement']:.0f} %; a random split of the same neurons: "
        f"{figure(random_split['silhouette'], '.3f')}, "
        f"{100 * random_split['neighbour_agreement']:.0f} %"
    ]


def sampled_pairs(
    chosen_TK: Int[Tensor, "T K"], points: int, shown: int, generator: torch.Generator
) -> tuple[Int[Tensor, " P"], Int[Tensor, " P"]]:
    """About `points` places of tokens at random, and the expert that runs for each.

    There are as many of every expert that is shown: at most `shown`, evenly spaced among those with
    two tokens or more; with one, an output has no neighbour of its own.
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
    hidden_PN = F.silu(ffn.gate(x_PD)) * ffn.up(x_PD)
    is_own_PN = (expert_of_neuron_N == expert_P[:, None]).to(hidden_PN.device)
    return F.linear(hidden_PN * is_own_PN, ffn.down.weight).float().cpu()


def separation(outputs: NDArray[Any], experts: NDArray[Any]) -> dict[str, Any]:
    """How well points are told apart by expert, in all their dimensions.

    Returns:
        `silhouette`: mean silhouette, -1 to 1; above 0 where points are nearer to those of their
        own expert than to any other's. None where there is one expert.
        `neighbour_agreement`: share of points whose nearest neighbour is of the same expert.
        `neighbour_chance`: the same for neighbours at random.
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


def sensitivity(run: AnalysedRun) -> Findings:
    """What the split of each layer costs by itself: whether layers should have stayed dense.

    Nats a token above the dense model with one layer split, `alone_L`, and with all, `at_once`, on
    one forward pass of the text. Weights are the dense model's: a repair, which follows the layers
    before, is left out. A layer of which FFN and attention are split is split in both.
    """
    dense = run.original
    rows_BT = run.tokens[: max(1, FORWARD_TOKENS // run.tokens.shape[1])]
    nats, maskings = stock_nats(dense.model), maskings_of(dense, run.layout)

    def loss(*layers: int) -> float:
        with masked(dense, maskings, layers):
            return float(nats(rows_BT).mean())

    reference, alone = loss(), []
    with run.progress.bar("one layer split") as update:
        for layer in run.layers:
            alone.append(loss(layer) - reference)
            update(len(alone), len(run.layers))
    at_once, layers = loss(*run.layers) - reference, list(run.layers)
    values = {"layers": layers, "alone_L": alone, "at_once": at_once, "dense": reference}
    return values, [costs_said(layers, alone, at_once)]


def costs_said(layers: list[int], alone_L: list[float], at_once: float) -> str:
    """Which layers cost most, beside all at once; and whether the first may better stay dense."""
    costs = sorted(zip(alone_L, layers, strict=True), reverse=True)
    most = ", ".join(f"{cost:.3f} (layer {layer})" for cost, layer in costs[:3])
    said = (
        f"nats a token above dense with one layer split and nothing repaired, the most: {most}; "
        f"the median layer {costs[len(costs) // 2][0]:.3f}; all layers at once {at_once:.3f}"
    )
    if costs[0][1] == layers[0] and costs[0][0] * len(costs) > 4 * at_once:
        said += f": convert with --first-dense-layers {layers[0] + 1} and compare"
    return said
