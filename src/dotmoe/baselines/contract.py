"""The contract of a method, and what several of them compute."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dotmoe.calibrate import CalibrateConfig, activations, block_inputs, harden
from dotmoe.errors import require_package
from dotmoe.granularity import Granularity
from dotmoe.models.family import DenseModel, GatedFFN
from dotmoe.moe.objective import IGNORED, distillation_loss, hidden_states, next_token_labels
from dotmoe.options import at_least

STARTS, ROUNDS = 4, 20
"""Of k-means: random starts, of which the best is kept, and rounds of each at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselineConfig:
    """What the methods other than DOT-MoE can be told, besides calibration_tokens and ridge."""

    split_router: Literal["own", "ridge"] = "own"
    """`own`: the router of the method itself (cmoe: a linear fit to it, since no stock architecture
    holds it). `ridge`: the one that DOT-MoE starts from, fitted to the method's experts."""
    router_steps: Annotated[int, at_least(0)] = 0
    """Steps that a baseline's router is trained, by the alignment phase with the experts fixed; 0:
    not at all."""
    lte_steps: Annotated[int, at_least(1)] = 100
    """Steps of 1,024 calibration tokens in which LTE's gates are trained; for lte."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One FFN, or attention, with what is known of it."""

    ffn: GatedFFN
    """The layer's FFN, whichever is split."""
    x_TD: Tensor
    """Inputs over the calibration tokens, float32."""
    energy: Callable[[], Float[Tensor, "T N"]]
    """Square of each unit's contribution to the output; only until the next layer."""
    generator: torch.Generator
    """Source of all randomness in this layer, on the CPU."""

    def hidden(self) -> Float[Tensor, "T N"]:
        """H of those inputs (eq:ffn_intermediate), float32."""
        return activations(self.ffn, self.x_TD.to(self.ffn.down.weight.dtype))


class LayerSplit(NamedTuple):
    """What a method decides for one layer."""

    layer: Layer
    expert_of_neuron_N: Int[Tensor, " N"]
    """Expert of each unit, or `ALWAYS_ON` for the shared expert's."""
    router_ED: Float[Tensor, "E D"]
    """The method's own router, or the closest linear one to it."""
    own: Mapping[str, Tensor] = {}
    """What the method's own router reads, where no export holds it: see `Method.own`."""


Own = Callable[[Mapping[str, Tensor], Tensor, Tensor, int], Tensor]
"""A router that no stock architecture holds: what it reads of a layer, the FFN's input [T, D],
hidden activations [T, N] and k, to the experts that run: 1, else 0, [T, E]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitInputs:
    """What every method gets: the same model, tokens and budget."""

    dense: DenseModel
    tokens_BT: Int[Tensor, "B T"]
    """Calibration text, and no more of it than the method may look at."""
    granularity: Granularity
    """E experts of s units of one target, k of them active, and the shared units."""
    config: BaselineConfig
    calibrate: CalibrateConfig
    seed: int

    def layers(
        self, converted: Callable[[int], AbstractContextManager[None]] | None = None
    ) -> Iterator[Layer]:
        """Every layer in order, as of `dotmoe.calibrate.block_inputs`."""
        modules = self.dense.family.layers(self.dense.model)
        inputs = block_inputs(self.dense, self.tokens_BT, self.granularity.target, converted)
        for index, (x_TD, energy) in enumerate(inputs):
            yield Layer(
                energy=energy,
                ffn=self.dense.family.ffn(modules[index]),
                x_TD=x_TD.float(),
                generator=torch.Generator().manual_seed(self.seed + index),
            )


def next_token_loss(dense: DenseModel, tokens_BT: Tensor, *, summed: bool = False) -> Tensor:
    """Next-token cross-entropy of a batch, the mean or the sum, with its gradient."""
    tokens_BT = tokens_BT.long().to(dense.device)
    labels_T = next_token_labels(tokens_BT)
    weight = float((labels_T != IGNORED).sum()) if summed else 1.0
    hidden_TD, head_VD = hidden_states(dense, tokens_BT), dense.family.head(dense.model).weight
    return distillation_loss(hidden_TD, None, head_VD, labels_T, kl_weight=0.0, ce_weight=weight)[0]


def optimal_assignment(cost_NE: Float[Tensor, "N E"]) -> Int[Tensor, " N"]:
    """Assignment of N items to E experts, N / E each, whose summed cost no other undercuts.

    The rivals do so by Jonker-Volgenant or minimum-cost flow; this is POT's network simplex, with
    the same optimum. Costs are finite. A `UserError` where POT is not installed.
    """
    require_package("ot", "baselines", "the exact assignment of this method")
    import ot

    # Integer supplies and demands have an integer optimum, which the simplex method returns.
    supply_N, room_E = (torch.ones(size, dtype=torch.float64) for size in cost_NE.shape)
    room_E *= len(supply_N) // len(room_E)
    each = supply_N.numpy(), room_E.numpy(), cost_NE.double().cpu().numpy()
    flow_NE = torch.from_numpy(ot.emd(*each, numItermax=100_000_000))
    return flow_NE.argmax(dim=1).to(cost_NE.device)


def balanced_clusters(
    score: Callable[[Float[Tensor, "N E"]], Float[Tensor, "N E"]],
    num_items: int,
    num_clusters: int,
    generator: torch.Generator,
) -> Int[Tensor, " N"]:
    """Clusters of one size whose items score high, the best of `STARTS`.

    `score` says how well each item fits each cluster, given the clusters: 1 for members, else 0.
    """

    def from_random_centres() -> tuple[float, Tensor]:
        """Total score and clusters of one start, when another round makes nothing better."""
        centre_E = torch.randperm(num_items, generator=generator)[:num_clusters]
        score_NE = score(F.one_hot(centre_E, num_items).T.float())
        best = -torch.inf, centre_E
        for _ in range(ROUNDS + 1):
            expert_N = harden(score_NE)
            member_NE = F.one_hot(expert_N, num_clusters).float()
            score_NE = score(member_NE)
            total = float((score_NE * member_NE).sum(dtype=torch.float64))
            if total <= best[0]:
                break
            best = total, expert_N
        return best

    return max((from_random_centres() for _ in range(STARTS)), key=lambda start: start[0])[1]


def balanced_kmeans(
    features_NF: Tensor, num_clusters: int, generator: torch.Generator
) -> Int[Tensor, " N"]:
    """Clusters of equal size with small squared distances to their centres."""

    def score(member_NE: Tensor) -> Tensor:
        member_NE = member_NE.to(features_NF.device)
        return -squared_distance(features_NF, (member_NE / member_NE.sum(dim=0)).T @ features_NF)

    return balanced_clusters(score, len(features_NF), num_clusters, generator)


def means(features_NF: Tensor, expert_N: Tensor, num_clusters: int) -> Float[Tensor, "E F"]:
    """Mean of the features of each cluster's items; clusters are of one size."""
    order = expert_N.argsort(stable=True)
    return features_NF[order].view(num_clusters, -1, features_NF.shape[1]).mean(dim=1)


def squared_distance(features_NF: Tensor, centre_EF: Tensor) -> Tensor:
    """Squared distances less each item's own norm, which no assignment can change."""
    return centre_EF.square().sum(dim=1) - 2 * features_NF @ centre_EF.T
