"""The contract of a method: what it is given, what it decides for a layer, and its options."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dotmoe.calibrate import CalibrateConfig, ffn_inputs
from dotmoe.granularity import Granularity
from dotmoe.models.dense import DenseModel
from dotmoe.models.traits import GatedFFN
from dotmoe.options import at_least


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselineConfig:
    """What the methods other than DOT-MoE can be told, besides calibration_tokens and ridge."""

    shared_experts: Annotated[int, at_least(1)] | None = None
    """Active experts that are merged into one shared expert, at least 1 and fewer than k; for cmoe
    and llama_moe_v2_residual. Default: half of k, as in both papers."""
    split_router: Literal["own", "ridge"] = "own"
    """`own`: the router of the method itself (cmoe: a linear fit to it, since no stock architecture
    holds it). `ridge`: the one that DOT-MoE starts from, fitted to the method's experts."""
    router_steps: Annotated[int, at_least(0)] = 0
    """Steps that a baseline's router is trained, by the alignment phase with the experts fixed; 0:
    not at all."""
    clustered_rows: Literal["gate", "up", "both"] = "gate"
    """Rows whose directions weight_clusters compares."""
    cluster_rounds: Annotated[int, at_least(1)] = 20
    """Rounds of k-means at most; for weight_clusters, co_activation and llama_moe_v2."""
    cluster_starts: Annotated[int, at_least(1)] = 4
    """Random starts of k-means, of which the best is kept; for the same methods."""
    marked_neurons: Annotated[int, at_least(1)] = 10
    """Neurons that count as active for a token (K_a); for cmoe."""
    marker_rounds: Annotated[int, at_least(1)] = 1
    """Rounds of k-means on the markers; for cmoe, whose published code does one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One FFN with what is known of it."""

    ffn: GatedFFN
    x_TD: Tensor
    """FFN inputs over the calibration tokens, float32."""
    generator: torch.Generator
    """Source of all randomness in this layer, on the CPU."""

    @torch.no_grad()
    def hidden(self) -> Float[Tensor, "T N"]:
        """H of eq:ffn_intermediate over the calibration tokens, float32."""
        x = self.x_TD.to(self.ffn.down.weight.dtype)
        hidden: Tensor = torch.nn.functional.silu(self.ffn.gate(x)) * self.ffn.up(x)
        return hidden.float()


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSplit:
    """What a method decides for one layer."""

    layer: Layer
    expert_of_neuron_N: Int[Tensor, " N"]
    """Expert of each neuron, or `ALWAYS_ON` for the shared expert's."""
    router_ED: Float[Tensor, "E D"]
    """The method's own router, or the closest linear one to it."""
    representative_E: Int[Tensor, " E"] | None = None
    """Where the method's own router is no linear map: the neuron whose |H| is an expert's score."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitInputs:
    """What every method gets: the same model, tokens and budget."""

    dense: DenseModel
    tokens_BT: Int[Tensor, "B T"]
    """Calibration text, and no more of it than the method may look at."""
    granularity: Granularity
    """E experts of s neurons, k of them active, and the shared neurons."""
    config: BaselineConfig
    calibrate: CalibrateConfig
    seed: int

    def layers(self) -> Iterator[Layer]:
        """Every layer in order. All inputs are those of the dense model."""
        modules = self.dense.family.layers(self.dense.model)
        inputs = ffn_inputs(self.dense, self.tokens_BT)
        for index, (module, x_TD) in enumerate(zip(modules, inputs, strict=True)):
            yield Layer(
                ffn=self.dense.family.ffn(module),
                x_TD=x_TD.float(),
                generator=torch.Generator().manual_seed(self.seed + index),
            )


@dataclass(frozen=True, slots=True)
class Method:
    """A published way to split FFNs."""

    split: Callable[[SplitInputs], Iterator[LayerSplit]]
    """Splits the layers of a model one after the other."""
    has_shared_expert: bool = False
