"""STAGE extract: the layout that is exported, and what a method gives with it."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from dotmoe.common.files import save_tensors
from dotmoe.method.assignment import assignment_plan, rounded
from dotmoe.method.config import AssignmentConfig
from dotmoe.method.granularity import Granularity
from dotmoe.method.layout import ALWAYS_ON, ExpertLayout, load_layouts, save_layouts
from dotmoe.method.state import AlignState

_OWN_ROUTER = "own_router.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class Extracted:
    """What the stage gives for one target, by DOT-MoE or by a method to compare with."""

    layout: ExpertLayout
    own_router: dict[str, Tensor] | None = None
    """Tensors, [L, ...], of a router that no export can hold; None if the layout's is all."""


def save_extracted(extracted: tuple[Extracted, ...], folder: Path) -> None:
    """Write `layout.safetensors`, and `own_router.safetensors` if there is such a router."""
    save_layouts(tuple(each.layout for each in extracted), folder)
    own_router = extracted[0].own_router  # of FFNs
    if own_router:
        save_tensors(own_router, folder / _OWN_ROUTER)


def load_extracted(folder: Path) -> tuple[Extracted, ...]:
    """Read what `save_extracted` wrote; a `UserError` as of `load_layouts`."""
    first, *others = load_layouts(folder)
    file = folder / _OWN_ROUTER
    own_router = load_file(file) if file.exists() else None
    return Extracted(layout=first, own_router=own_router), *(
        Extracted(layout=layout) for layout in others
    )


@torch.no_grad()
def extract(state: AlignState, split: Granularity, config: AssignmentConfig) -> ExpertLayout:
    """Round the plan at the final temperature to the layout that is exported.

    Router rows are centred over experts first: this changes no routing, and keeps the gates of the
    exported architecture closest to 1. All neurons of leading dense layers are always on.
    """
    plan = assignment_plan(config, state.affinity_LNE, split.capacity, config.tau_end)
    centred_LED = state.router_LED - state.router_LED.mean(dim=1, keepdim=True)
    expert_of_neuron_LN = rounded(plan.entries, split.capacity).cpu()
    expert_of_neuron_LN[expert_of_neuron_LN == split.num_experts] = ALWAYS_ON
    expert_of_neuron_LN[: split.first_dense_layers] = ALWAYS_ON
    return ExpertLayout(
        expert_of_neuron_LN=expert_of_neuron_LN,
        router_LED=centred_LED.cpu(),
        active_experts=split.active_experts,
        target=split.target,
    )
