"""Other roads to an `ExpertLayout`: training-free splits of published methods, on the same budget.

Each file says what is the rival's and what differs; `contract.py` is what a method has to do.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Int
from safetensors.torch import load_file, save_file
from torch import Tensor

from dotmoe.baselines.cmoe import cmoe
from dotmoe.baselines.co_activation import co_activation
from dotmoe.baselines.contract import BaselineConfig, LayerSplit, Method, SplitInputs
from dotmoe.baselines.llama_moe_v2 import llama_moe_v2
from dotmoe.baselines.own_router import routed_by_representatives
from dotmoe.baselines.random_split import contiguous_split, random_split
from dotmoe.baselines.weight_clusters import weight_clusters
from dotmoe.calibrate import contributions, expert_sums, ridge_router, unit_logits
from dotmoe.errors import UserError
from dotmoe.granularity import Granularity
from dotmoe.layout import ALWAYS_ON, ExpertLayout
from dotmoe.moe.assignment import AlignState
from dotmoe.progress import Update, no_update

__all__ = [
    "METHODS",
    "Baseline",
    "BaselineConfig",
    "MethodName",
    "SplitInputs",
    "baseline",
    "granularity_of",
    "routed_by_representatives",
    "state_of",
]

METHODS = {
    "random_split": Method(random_split),
    "contiguous_split": Method(contiguous_split),
    "weight_clusters": Method(weight_clusters),
    "co_activation": Method(co_activation),
    "llama_moe_v2": Method(llama_moe_v2),
    "llama_moe_v2_residual": Method(llama_moe_v2, has_shared_expert=True),
    "cmoe": Method(cmoe, has_shared_expert=True),
}
"""Methods to compare DOT-MoE with, by the name on the command line: a new one is one line here."""

if TYPE_CHECKING:
    MethodName = str
else:
    MethodName = Literal[("dot_moe", *METHODS)]

_ROUTERS_FILE = "own_router.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """What a method made of a model."""

    layout: ExpertLayout
    representative_LE: Int[Tensor, "L E"] | None
    """Where the method's own router is no linear map: see `LayerSplit.representative_E`."""

    def save(self, folder: Path) -> None:
        """Write `layout.safetensors`, and `own_router.safetensors` where there is one."""
        self.layout.save(folder / "layout.safetensors")
        if self.representative_LE is not None:
            save_file({"representative": self.representative_LE}, folder / _ROUTERS_FILE)

    @classmethod
    def load(cls, folder: Path) -> "Baseline":
        """Inverse of `save`."""
        routers = folder / _ROUTERS_FILE
        return cls(
            layout=ExpertLayout.load(folder / "layout.safetensors"),
            representative_LE=load_file(routers)["representative"] if routers.exists() else None,
        )


def granularity_of(method: str, split: Granularity, config: BaselineConfig) -> Granularity:
    """The split of a method, at the active neurons of `split`.

    A method with a shared expert merges `shared_experts` of the k active experts into it.

    Raises:
        UserError: A shared expert for a method that has none, or one that leaves no other expert to
            run.

    Example:
        >>> granularity_of("cmoe", Granularity(num_experts=16, expert_size=8, active_experts=4),
        ...                BaselineConfig())
        Granularity(num_experts=14, expert_size=8, active_experts=2, shared_size=16, ...)
    """
    shared = config.shared_experts
    if method not in METHODS or not METHODS[method].has_shared_expert:
        if shared is not None:
            others = " or ".join(name for name in METHODS if METHODS[name].has_shared_expert)
            raise UserError(
                f"shared_experts is {shared}, but {method} has no shared expert. Leave it out, or "
                f"choose {others}."
            )
        return split
    if split.active_experts < 2:
        raise UserError(
            f"active_experts is 1, but {method} needs at least 2: one for the shared expert and "
            "one that is routed. Choose smaller experts or more active ones."
        )
    if shared is None:
        shared = split.active_experts // 2
    if not 1 <= shared < split.active_experts:
        raise UserError(
            f"shared_experts is {shared}, but of {split.active_experts} active experts at least "
            f"one must be shared and one routed. Choose 1 to {split.active_experts - 1}."
        )
    return replace(
        split,
        num_experts=split.num_experts - shared,
        active_experts=split.active_experts - shared,
        shared_size=shared * split.expert_size,
    )


def baseline(
    method: str,
    inputs: SplitInputs,
    on_progress: Update = no_update,
) -> Baseline:
    """Layout of a method: its experts, and its own router or a ridge regression to them.

    Args:
        method: A name in `METHODS`.
        inputs: Model, text, budget and options; `inputs.granularity` is what `granularity_of` gave.
        on_progress: Called with (layers done, layers).
    """
    split = inputs.granularity
    experts, routers, representatives = [], [], []
    for index, made in enumerate(METHODS[method].split(inputs)):
        experts.append(made.expert_of_neuron_N.cpu())
        router_ED = made.router_ED
        if inputs.config.split_router == "ridge":
            router_ED = _fitted_router(made, inputs)
        router_ED = unit_logits(router_ED.float(), made.layer.x_TD)
        routers.append(router_ED.cpu())
        if made.representative_E is not None:
            representatives.append(made.representative_E.cpu())
        on_progress(index + 1, inputs.dense.widths.layers)
    expert_of_neuron_LN = torch.stack(experts)
    expert_of_neuron_LN[: split.first_dense_layers] = ALWAYS_ON
    return Baseline(
        layout=ExpertLayout(
            expert_of_neuron_LN=expert_of_neuron_LN,
            router_LED=torch.stack(routers),
            active_experts=split.active_experts,
        ),
        representative_LE=torch.stack(representatives) if representatives else None,
    )


def state_of(layout: ExpertLayout, device: torch.device) -> AlignState:
    """Affinities that every solver rounds to the layout's own experts, and its routers.

    One-hot affinities are balanced as they are: the plan is their softmax at any temperature, its
    largest entries the experts. For layouts without a shared expert.
    """
    expert_LN = layout.expert_of_neuron_LN.clone()
    in_order = torch.arange(layout.num_neurons) // layout.expert_size
    expert_LN[: layout.first_dense_layers] = in_order
    return AlignState(
        affinity_LNE=F.one_hot(expert_LN, layout.num_experts).float().to(device),
        router_LED=layout.router_LED.to(device),
        step=0,
    )


def _fitted_router(made: LayerSplit, inputs: SplitInputs) -> Tensor:
    """Ridge regression to each routed expert's share of the contribution energy, as DOT-MoE's."""
    layer = made.layer
    contribution_TN = contributions(layer.ffn, layer.x_TD.to(layer.ffn.down.weight.dtype))
    expert_N = made.expert_of_neuron_N.to(contribution_TN.device)
    energy_TE = expert_sums(contribution_TN.square(), expert_N, inputs.granularity.num_experts)
    return ridge_router(layer.x_TD, energy_TE, inputs.calibrate.ridge)
