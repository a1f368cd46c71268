"""What the experts of one layer write, as points: t-SNE (fig:tsne_appendix), and how far apart."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from dotmoe.analyse.routing import router_inputs
from dotmoe.analyse.run import AnalysedRun
from dotmoe.layout import ALWAYS_ON
from dotmoe.models.traits import GatedFFN
from dotmoe.tables import figure

PCA_DIMENSIONS = 50
"""Dimensions that t-SNE is given at most; the rest of an output is noise to it, and slow."""
TSNE_PERPLEXITY = 30.0
FEWEST_OUTPUTS = 2
"""Of an expert: with one, it has no neighbour of its own."""


@torch.no_grad()
def values(run: AnalysedRun) -> dict[str, Any]:
    """Outputs of experts in two dimensions, and how well the experts are told apart; needs
    scikit-learn.

    Experts write through different rows of W_down, so that their outputs lie apart whatever the
    experts are. The same figures for a random split of the same neurons, on the same tokens and
    expert numbers, say how much of it that is.
    """
    config, layout, layer = run.config, run.layout, run.layer
    token_P, expert_P = sampled_pairs(
        run.routes.chosen_LTK[run.routes.layers.index(layer)],
        layout.num_experts,
        points=config.points,
        shown=config.experts_shown,
        seed=config.seed,
    )
    unique_U, place_P = torch.unique(token_P, return_inverse=True)
    x_PD = router_inputs(run.dense, layout, run.tokens, layer, unique_U)[place_P]
    ffn = run.dense.family.ffn(run.dense.family.layers(run.dense.model)[layer])
    own_N = layout.expert_of_neuron_LN[layer]
    outputs = sampled_outputs(x_PD, ffn, own_N, expert_P).numpy()
    random = sampled_outputs(x_PD, ffn, shuffled(own_N, config.seed), expert_P).numpy()
    points, perplexity = embedding(outputs, config.seed)
    return {
        "layer": layer,
        "points": points.tolist(),
        "expert": expert_P.tolist(),
        "perplexity": perplexity,
        "experts_shown": len(set(expert_P.tolist())),
        "num_experts": layout.num_experts,
        **separation(outputs, expert_P.numpy()),
        "random_split": separation(random, expert_P.numpy()),
    }


def sampled_pairs(
    chosen_TK: Int[Tensor, "T K"], num_experts: int, *, points: int, shown: int, seed: int
) -> tuple[Int[Tensor, " P"], Int[Tensor, " P"]]:
    """About `points` places of tokens at random, and the expert that runs for each.

    There are as many of every expert that is shown: at most `shown`, evenly spaced among those with
    two tokens or more.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = torch.bincount(chosen_TK.flatten().long(), minlength=num_experts)
    used = (counts >= FEWEST_OUTPUTS).nonzero().flatten()
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
    outputs_PD = torch.empty(len(x_PD), ffn.down.weight.shape[0])
    for expert in sorted(set(expert_P.tolist())):
        rows = expert_P == expert
        x = x_PD[rows.to(x_PD.device)]
        hidden = F.silu(ffn.gate(x)) * ffn.up(x)
        own_N = (expert_of_neuron_N == expert).to(hidden.device)
        outputs_PD[rows] = F.linear(hidden[:, own_N], ffn.down.weight[:, own_N]).float().cpu()
    return outputs_PD


def embedding(outputs: NDArray[Any], seed: int) -> tuple[NDArray[Any], float]:
    """t-SNE of the first principal components, and its perplexity (neighbours looked at)."""
    from sklearn.decomposition import PCA  # an extra
    from sklearn.manifold import TSNE

    num_points, width = outputs.shape
    perplexity = min(TSNE_PERPLEXITY, (num_points - 1) / 3)
    dimensions = min(PCA_DIMENSIONS, num_points, width)
    reduced = PCA(dimensions, random_state=seed).fit_transform(outputs)
    tsne = TSNE(n_components=2, perplexity=perplexity, init="pca", random_state=seed)
    return tsne.fit_transform(reduced), perplexity


def separation(outputs: NDArray[Any], experts: NDArray[Any]) -> dict[str, float | None]:
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


def shuffled(expert_of_neuron_N: Int[Tensor, " N"], seed: int) -> Int[Tensor, " N"]:
    """Experts of the same sizes with neurons at random; those that are always on stay."""
    routed = (expert_of_neuron_N != ALWAYS_ON).nonzero().flatten()
    order = torch.randperm(len(routed), generator=torch.Generator().manual_seed(seed))
    result = expert_of_neuron_N.clone()
    result[routed] = expert_of_neuron_N[routed][order]
    return result


def says(values: dict[str, Any]) -> list[str]:
    """How well the experts are told apart, beside the random split."""
    random = values["random_split"]
    return [
        f"layer {values['layer']}, {len(values['points'])} outputs of {values['experts_shown']} "
        f"experts: silhouette {figure(values['silhouette'], '.3f')}, nearest neighbour of the same "
        f"expert {100 * values['neighbour_agreement']:.0f} %; a random split of the same neurons: "
        f"{figure(random['silhouette'], '.3f')}, {100 * random['neighbour_agreement']:.0f} %"
    ]
