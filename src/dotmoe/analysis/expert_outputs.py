"""What the experts of one layer write, as points: t-SNE (fig:tsne_appendix), and how far apart."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from dotmoe.analysis.routing import router_inputs
from dotmoe.artifacts import DenseModel
from dotmoe.layout import ALWAYS_ON, ExpertLayout
from dotmoe.models.traits import GatedFFN

PCA_DIMENSIONS = 50
"""Dimensions that t-SNE is given at most; the rest of an output is noise to it, and slow."""
TSNE_PERPLEXITY = 30.0
FEWEST_OUTPUTS = 2
"""Of an expert: with one, it has no neighbour of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Pairs of a token and an expert that runs for it."""

    token_P: Int[Tensor, " P"]
    """Places of the tokens in the flattened text."""
    expert_P: Int[Tensor, " P"]


def sampled_pairs(
    chosen_TK: Int[Tensor, "T K"], num_experts: int, *, points: int, shown: int, seed: int
) -> Sample:
    """Tokens at random for some experts, as many for each as there are, in all `points` at most.

    Args:
        chosen_TK: Experts of each token.
        num_experts: E.
        points: Pairs wanted.
        shown: Experts at most: evenly spaced among those with two tokens or more.
        seed: Of the choice of tokens.
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
    return Sample(token_P=torch.cat(tokens), expert_P=torch.cat(experts))


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


@torch.no_grad()
def expert_outputs_tsne(
    dense: DenseModel,
    layout: ExpertLayout,
    tokens_BT: Int[Tensor, "B T"],
    layer: int,
    sample: Sample,
    seed: int,
) -> dict[str, Any]:
    """Outputs of experts in two dimensions, and how well the experts are told apart; needs
    scikit-learn.

    Experts write through different rows of W_down, so that their outputs lie apart whatever the
    experts are. The same figures for a random split of the same neurons, on the same tokens and
    expert numbers, say how much of it that is.

    Args:
        dense: Dense model, or what finetuning left of it.
        layout: Experts, routers and k.
        tokens_BT: Text.
        layer: Number of a split layer.
        sample: Tokens and experts, see `sampled_pairs`.
        seed: Of t-SNE and of the random split.
    """
    unique_U, place_P = torch.unique(sample.token_P, return_inverse=True)
    x_PD = router_inputs(dense, layout, tokens_BT, layer, unique_U)[place_P]
    ffn = dense.family.ffn(dense.family.layers(dense.model)[layer])
    own_N = layout.expert_of_neuron_LN[layer]
    outputs = sampled_outputs(x_PD, ffn, own_N, sample.expert_P).numpy()
    random = sampled_outputs(x_PD, ffn, shuffled(own_N, seed), sample.expert_P).numpy()
    experts = sample.expert_P.numpy()
    points, perplexity = embedding(outputs, seed)
    return {
        "layer": layer,
        "points": points.tolist(),
        "expert": experts.tolist(),
        "perplexity": perplexity,
        "experts_shown": len(np.unique(experts)),
        "num_experts": layout.num_experts,
        "silhouette_plane": separation(points, experts)["silhouette"],
        **separation(outputs, experts),
        "random_split": separation(random, experts),
    }


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
