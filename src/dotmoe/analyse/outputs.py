"""What the experts of one layer write, as points: t-SNE (fig:tsne_appendix), and how far apart."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from dotmoe.analyse.run import AnalysedRun, router_inputs
from dotmoe.layout import ALWAYS_ON
from dotmoe.models.family import GatedFFN
from dotmoe.tables import figure


@torch.no_grad()
def values(run: AnalysedRun) -> dict[str, Any]:
    """Outputs of experts in two dimensions, and how well the experts are told apart (scikit-learn).

    Experts write through different rows of W_down, so that their outputs lie apart whatever the
    experts are. The same figures for a random split of the same neurons, on the same tokens and
    expert numbers, say how much of it that is.
    """
    from sklearn.decomposition import PCA  # an extra
    from sklearn.manifold import TSNE

    asked, layout, layer = run.asked, run.layout, run.layer
    generator = torch.Generator().manual_seed(asked.seed)
    chosen_TK = run.routes["ffn"][run.layers.index(layer)]
    token_P, expert_P = sampled_pairs(chosen_TK, asked.points, asked.experts_shown, generator)
    x_PD = router_inputs(run.dense, layout, run.tokens, layer)[token_P].to(run.dense.device)
    ffn = run.dense.family.ffn(run.dense.family.layers(run.dense.model)[layer])
    own_N = layout.expert_of_neuron_LN[layer]
    routed = own_N[own_N != ALWAYS_ON]
    random_N = own_N.clone()
    random_N[own_N != ALWAYS_ON] = routed[torch.randperm(len(routed), generator=generator)]
    outputs, random = (
        sampled_outputs(x_PD, ffn, split_N, expert_P).numpy() for split_N in (own_N, random_N)
    )
    # More dimensions are noise to t-SNE, and slow.
    reduced = PCA(min(50, *outputs.shape), random_state=asked.seed)
    perplexity = min(30.0, (len(outputs) - 1) / 3)
    tsne = TSNE(n_components=2, perplexity=perplexity, init="pca", random_state=asked.seed)
    return {
        "layer": layer,
        "points": tsne.fit_transform(reduced.fit_transform(outputs)).tolist(),
        "expert": expert_P.tolist(),
        "perplexity": perplexity,
        "experts_shown": len(set(expert_P.tolist())),
        "num_experts": layout.num_experts,
        **separation(outputs, expert_P.numpy()),
        "random_split": separation(random, expert_P.numpy()),
    }


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


def says(values: dict[str, Any]) -> list[str]:
    """How well the experts are told apart, beside the random split."""
    random = values["random_split"]
    return [
        f"layer {values['layer']}, {len(values['points'])} outputs of {values['experts_shown']} "
        f"experts: silhouette {figure(values['silhouette'], '.3f')}, nearest neighbour of the same "
        f"expert {100 * values['neighbour_agreement']:.0f} %; a random split of the same neurons: "
        f"{figure(random['silhouette'], '.3f')}, {100 * random['neighbour_agreement']:.0f} %"
    ]
