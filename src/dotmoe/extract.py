"""STAGE extract: from learned affinities and routers to the layout that is exported."""

import torch

from dotmoe.granularity import Granularity
from dotmoe.layout import ALWAYS_ON, ExpertLayout
from dotmoe.moe.assignment import AlignState, AssignmentConfig, hard_assignment, soft_plan


@torch.no_grad()
def extract(state: AlignState, split: Granularity, config: AssignmentConfig) -> ExpertLayout:
    """Round the plan at the final temperature.

    Router rows are centred over experts first: that changes no routing, and keeps the gates of the
    exported architecture closest to 1.

    Args:
        state: Affinities and routers.
        split: Gives k, the size of the shared expert, and the leading layers that stay dense: all
            their neurons are always on.
        config: Solver and final temperature.
    """
    plan = soft_plan(state.affinity_LNE, split.capacity, config, tau=config.tau_end)
    centred_LED = state.router_LED - state.router_LED.mean(dim=1, keepdim=True)
    expert_of_neuron_LN = hard_assignment(plan, split.capacity).cpu()
    expert_of_neuron_LN[expert_of_neuron_LN == split.num_experts] = ALWAYS_ON
    expert_of_neuron_LN[: split.first_dense_layers] = ALWAYS_ON
    return ExpertLayout(
        expert_of_neuron_LN=expert_of_neuron_LN,
        router_LED=centred_LED.cpu(),
        active_experts=split.active_experts,
    )
