"""The interface of a baseline method, and functions that several methods share."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dotmoe.common.errors import require_package
from dotmoe.common.seeds import generator_for
from dotmoe.method.assignment import assigned
from dotmoe.method.calibrate import block_inputs
from dotmoe.method.config import AssignmentConfig, CalibrateConfig
from dotmoe.method.granularity import Granularity
from dotmoe.method.layout import columns_of
from dotmoe.method.losses import IGNORED, distillation_loss, head_of, next_token_labels
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.family import GatedFFN
from dotmoe.models.hf_config import readout_of
from dotmoe.models.hooks import input_hooks
from dotmoe.models.scoring import hidden_states
from dotmoe.models.targets import TARGETS
from dotmoe.rivals.config import BaselineConfig

KMEANS_STARTS = 4
"""Number of random k-means starts, of which the best is kept."""
KMEANS_ROUNDS = 20
"""Maximum number of rounds of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One layer to split (its FFN or its attention), with its inputs on the calibration tokens."""

    ffn: GatedFFN
    """The layer's FFN, also when attention is split; its weights are valid until the next layer."""
    x_TD: Tensor
    """Inputs of the FFN or attention on the calibration tokens, float32."""
    energy: Callable[[], Float[Tensor, "T N"]]
    """Returns the squared contribution of each unit to the output; valid until the next layer."""
    generator: torch.Generator
    """Source of all randomness in this layer, on the CPU."""

    def hidden(self) -> Float[Tensor, "T N"]:
        """FFN activations H of the inputs `x_TD` (eq:ffn_intermediate), float32."""
        return self.ffn.hidden(self.x_TD.to(self.ffn.down.weight.dtype)).float()


class LayerSplit(NamedTuple):
    """What a method decides for one layer."""

    layer: Layer
    expert_of_neuron_N: Int[Tensor, " N"]
    """Expert of each unit, or `ALWAYS_ON` for the shared expert's."""
    router_ED: Float[Tensor, "E D"]
    """The method's own router, or the linear router that is closest to it."""
    own: Mapping[str, Tensor] = {}
    """Tensors of the method's own router, if no export can hold it: see `Method.own`."""


Own = Callable[[Mapping[str, Tensor], Tensor, Tensor, int], Tensor]
"""A router that no stock architecture holds. From its tensors for a layer, the FFN's input [T, D],
hidden activations [T, N] and k it computes a mask [T, E]: 1 where an expert runs, else 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitInputs:
    """The inputs of every method: the same model, tokens and budget."""

    dense: DenseModel
    tokens_BT: Int[Tensor, "B T"]
    """Calibration text: all tokens that the method may read."""
    granularity: Granularity
    """E experts of s units of one target, k of them active, and the shared units."""
    config: BaselineConfig
    calibrate: CalibrateConfig
    seed: int

    def layers(
        self, converted: Callable[[int], AbstractContextManager[None]] | None = None
    ) -> Iterator[Layer]:
        """Yield every layer in order, with the inputs of `calibrate.block_inputs`."""
        modules = self.dense.family.layers(self.dense.model)
        inputs = block_inputs(self.dense, self.tokens_BT, self.granularity.target, converted)
        for index, (x_TD, energy) in enumerate(inputs):
            yield Layer(
                energy=energy,
                ffn=self.dense.family.ffn(modules[index]),
                x_TD=x_TD.float(),
                generator=generator_for(self.seed, self.granularity.target, index),
            )


def next_token_loss(dense: DenseModel, tokens_BT: Tensor, *, summed: bool = False) -> Tensor:
    """Next-token cross-entropy of a batch, its mean or (`summed`) its sum; differentiable."""
    tokens_BT = tokens_BT.long().to(dense.device)
    labels_T = next_token_labels(tokens_BT)
    weight = float((labels_T != IGNORED).sum()) if summed else 1.0
    hidden_TD = hidden_states(dense.model, tokens_BT).flatten(0, 1)
    head_VD = head_of(dense)
    readout = readout_of(dense.config)
    return distillation_loss(
        hidden_TD, None, head_VD, labels_T, readout, kl_weight=0.0, ce_weight=weight
    )[0]


def optimal_assignment(cost_NE: Float[Tensor, "N E"]) -> Int[Tensor, " N"]:
    """Assignment of N items to E experts, N / E each, with the lowest total cost.

    The published methods use Jonker-Volgenant or minimum-cost flow; this uses POT's network
    simplex, with the same optimum. Costs are finite. Raises a `UserError` without POT.
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
    """Clusters of equal size whose items score high; the best of `KMEANS_STARTS` random starts.

    `score` maps memberships (1 for members, else 0) to the fit of each item to each cluster.
    """

    def from_random_centres() -> tuple[float, Tensor]:
        """Total score and clusters of one start, refined by rounds until one brings no gain."""
        centre_E = torch.randperm(num_items, generator=generator)[:num_clusters]
        score_NE = score(F.one_hot(centre_E, num_items).T.float())
        best = -torch.inf, centre_E
        for _ in range(KMEANS_ROUNDS + 1):
            expert_N = assigned(AssignmentConfig(), score_NE, num_items // num_clusters)
            member_NE = F.one_hot(expert_N, num_clusters).float()
            score_NE = score(member_NE)
            total = float((score_NE * member_NE).sum(dtype=torch.float64))
            if total <= best[0]:
                break
            best = total, expert_N
        return best

    return max((from_random_centres() for _ in range(KMEANS_STARTS)), key=lambda start: start[0])[1]


def balanced_kmeans(
    features_NF: Tensor, num_clusters: int, generator: torch.Generator
) -> Int[Tensor, " N"]:
    """Clusters of equal size with small squared distances to their centres."""

    def score(member_NE: Tensor) -> Tensor:
        member_NE = member_NE.to(features_NF.device)
        return -squared_distance(features_NF, (member_NE / member_NE.sum(dim=0)).T @ features_NF)

    return balanced_clusters(score, len(features_NF), num_clusters, generator)


def cluster_means(features_NF: Tensor, expert_N: Tensor, num_clusters: int) -> Float[Tensor, "E F"]:
    """Mean feature vector of each cluster; all clusters must have the same size."""
    order = expert_N.argsort(stable=True)
    return features_NF[order].view(num_clusters, -1, features_NF.shape[1]).mean(dim=1)


def squared_distance(features_NF: Tensor, centre_EF: Tensor) -> Tensor:
    """Squared distances minus each item's squared norm, which is the same in every assignment."""
    return centre_EF.square().sum(dim=1) - 2 * features_NF @ centre_EF.T


@contextmanager
def gated(
    dense: DenseModel,
    experts: Mapping[int, Int[Tensor, " N"]],
    gate: Callable[[int, Tensor, Tensor], Tensor],
) -> Iterator[None]:
    """Within this context, each neuron is multiplied by its expert's gate, and no router runs.

    `experts` maps each split layer to the experts of its neurons, of which none may be
    dropped. `gate` takes a layer's number,
    the input [T, D] of its FFN and the hidden activations [T, N], and returns the gates, [T, E].
    """
    family = dense.family
    ffn = TARGETS["ffn"]
    inputs = dict[int, Tensor]()
    layers = family.layers(dense.model)

    def weigh(layer: int, hidden: Tensor) -> Tensor:
        gate_TE = gate(layer, inputs[layer].flatten(0, -2), hidden.flatten(0, -2)).to(hidden.dtype)
        column_N = columns_of(experts[layer].to(hidden.device), gate_TE.shape[1])
        # The last column is of the neurons that are always on.
        gate_TN = F.pad(gate_TE, (0, 1), value=1.0)[:, column_N]
        return hidden * gate_TN.view_as(hidden)

    ffns = {layer: family.block(layers[layer], ffn) for layer in experts}
    downs = {layer: family.output(layers[layer], ffn) for layer in experts}
    with input_hooks(ffns, inputs.__setitem__), input_hooks(downs, weigh):
        yield
