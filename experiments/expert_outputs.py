"""Outputs of the experts of one layer in two dimensions, by t-SNE, and how well they separate.

    python experiments/expert_outputs.py RUN OUT --layer 9

RUN is a finished conversion whose FFNs are split. Experts write through different rows of W_down,
so outputs of any split separate to some degree. The control is a random split of the same neurons,
with the same metrics on the same tokens and expert numbers. Writes OUT/outputs.json.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from numpy.typing import NDArray
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE
from sklearn.metrics import silhouette_score
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from dotmoe.cli.arguments import settings as settings_of
from dotmoe.common.files import write_json
from dotmoe.common.options import ARGUMENT, PLACE
from dotmoe.export.routers import at_routers
from dotmoe.measure.analyse import captured_routes
from dotmoe.method.layout import ALWAYS_ON
from dotmoe.models.config import LoadConfig
from dotmoe.models.family import GatedFFN
from dotmoe.models.load import load_described
from dotmoe.run.finished import FinishedRun
from dotmoe.run.provenance import provenance

POINTS, EXPERTS_SHOWN, SEED = 1000, 16, 0
"""Approximate number of outputs for t-SNE, maximum number of experts, and seed of the sampling."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A run, and the layer to look into."""

    run: Annotated[str, ARGUMENT, PLACE]
    out: Annotated[str, ARGUMENT, PLACE]
    layer: int | None = None
    """Split layer. Default: a third of the way through the split layers, as in the paper."""
    tokens: int = 32768
    """Held-out tokens to route, in whole blocks."""
    load: LoadConfig = field(default_factory=LoadConfig)


@torch.no_grad()
def outputs(config: Config) -> dict[str, Any]:
    """Points of t-SNE, and metrics of the experts and of a random split (fig:tsne_appendix)."""
    run = FinishedRun(Path(config.run))
    layout, heldout = run.layouts[0], run.text.heldout
    tokens_BT = heldout.tokens_BT[: max(1, config.tokens // heldout.seq_len)]
    layers = layout.moe_layers
    layer = layers[len(layers) // 3] if config.layer is None else config.layer
    dense = load_described(run.described(), config.load)
    generator = torch.Generator().manual_seed(SEED)
    chosen_TK = captured_routes(dense, run.layouts, tokens_BT)["ffn"][layers.index(layer)]
    token_P, expert_P = sampled_pairs(chosen_TK, POINTS, EXPERTS_SHOWN, generator)
    seen = list[Tensor]()

    def look(index: int, x_TD: Tensor) -> None:
        if index == layer:
            seen.append(x_TD)

    for row_T in tokens_BT:
        at_routers(dense, run.layouts, row_T[None], look)
    x_PD = torch.cat(seen)[token_P]
    ffn = dense.family.ffn(dense.family.layers(dense.model)[layer])
    own_N = layout.expert_of_neuron_LN[layer]
    is_routed_N, random_N = own_N != ALWAYS_ON, own_N.clone()
    order = torch.randperm(int(is_routed_N.sum()), generator=generator)
    random_N[is_routed_N] = own_N[is_routed_N][order]
    own_PD, random_PD = (
        sampled_outputs(x_PD, ffn, split_N, expert_P).numpy() for split_N in (own_N, random_N)
    )
    # More dimensions add noise to t-SNE and make it slow.
    reduced = PCA(min(50, *own_PD.shape), random_state=SEED).fit_transform(own_PD)
    perplexity = min(30.0, (len(own_PD) - 1) / 3)
    tsne = TSNE(n_components=2, perplexity=perplexity, init="pca", random_state=SEED)
    own, random_split = (separation(each, expert_P.numpy()) for each in (own_PD, random_PD))
    return {
        "layer": layer,
        "points": tsne.fit_transform(reduced).tolist(),
        "expert": expert_P.tolist(),
        "perplexity": perplexity,
        "experts_shown": len(set(expert_P.tolist())),
        "num_experts": layout.num_experts,
        **own,
        "random_split": random_split,
    }


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
    _, counts = np.unique(experts, return_counts=True)
    nearest = NearestNeighbors(n_neighbors=1).fit(outputs).kneighbors(return_distance=False)[:, 0]
    total = len(experts)
    return {
        "silhouette": float(silhouette_score(outputs, experts)) if len(counts) > 1 else None,
        "neighbour_agreement": float((experts[nearest] == experts).mean()),
        "neighbour_chance": float((counts * (counts - 1)).sum() / (total * (total - 1))),
    }


if __name__ == "__main__":
    asked = settings_of(Config, __doc__)
    found = {"origin": "measured", "values": outputs(asked), "provenance": provenance(SEED)}
    write_json(Path(asked.out) / "outputs.json", found)
