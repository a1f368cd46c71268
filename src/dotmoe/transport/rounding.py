"""Greedy rounding of a plan to one expert a neuron, as a stable matching found in parallel."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dotmoe.transport.plan import Capacity, checked_capacity


def greedy_assignment(plan: Float[Tensor, "*L N E"], *, capacity: Capacity) -> Int[Tensor, "*L N"]:
    """Hard assignment M of eq:assignment_ste: the paper's greedy selection, without its sort.

    Defined by a serial loop over all entries of a layer, largest first, ties by flat index
    n * E + e: assign neuron n to expert e if n is free and e has room. Both sides rank their
    entries in that one order, so the outcome is the only stable matching, and deferred acceptance
    reaches it: every free neuron proposes to its best expert that would still take it, and every
    expert keeps as many of the best as it has room for.

    Args:
        plan: Any finite scores, larger is closer; see `checked_capacity`.
        capacity: Neurons of every expert (s), or of each.

    Returns:
        Expert of each neuron, 0 to E - 1, every expert exactly full; equal to the serial loop entry
        for entry, ties included, on every device. No gradient.

    Example:
        >>> greedy_assignment(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), capacity=1)
        tensor([0, 1])
    """
    capacity_E = checked_capacity(plan, capacity)
    *leading, num_neurons, num_experts = plan.shape
    # Rows are the neurons of all layers; a slot is one expert of one layer.
    scores_RE = plan.detach().reshape(-1, num_experts)
    rows_R = torch.arange(len(scores_RE), device=plan.device)
    capacity_S = capacity_E.repeat(len(rows_R) // num_neurons)
    # The first proposal of all rows at once; `max` returns the first of equal entries.
    score_R, expert_R = scores_RE.max(dim=-1)
    slot_R = rows_R // num_neurons * num_experts + expert_R
    # What a newcomer has to beat: anything, until the slot refuses its first row.
    worst_score_S = scores_RE.new_full(capacity_S.shape, -torch.inf)
    worst_row_S = torch.zeros_like(capacity_S)
    while True:
        # Slots asked by too many keep their best; only these do any work.
        size_S = torch.bincount(slot_R, minlength=len(capacity_S))
        crowded_S = size_S > capacity_S
        rows = crowded_S[slot_R].nonzero().squeeze(-1)  # in row order, kept by the stable sorts
        rows = rows[_best_first(slot_R[rows], score_R[rows])]
        size_S = torch.where(crowded_S, size_S, 0)
        slots = slot_R[rows]
        place = torch.arange(len(rows), device=rows.device) - (size_S.cumsum(0) - size_S)[slots]
        last = rows[place == capacity_S[slots] - 1]
        worst_score_S[slot_R[last]], worst_row_S[slot_R[last]] = score_R[last], last
        free = rows[place >= capacity_S[slots]]
        if not len(free):
            return (slot_R % num_experts).reshape(*leading, num_neurons)
        # Every refused row asks the best slot that would still take it. What a slot asks for only
        # rises, so one whose worst row beats a free row now would refuse it for ever: no record of
        # refusals is needed.
        layer = free // num_neurons
        worst_score = worst_score_S.view(-1, num_experts)[layer]
        worst_row = worst_row_S.view(-1, num_experts)[layer]
        scores = scores_RE[free]
        lost = (scores == worst_score) & (free.unsqueeze(-1) > worst_row)
        scores.masked_fill_((scores < worst_score) | lost, -torch.inf)
        score_R[free], expert = scores.max(dim=-1)
        slot_R[free] = layer * num_experts + expert


def _best_first(slot: Int[Tensor, " F"], score: Float[Tensor, " F"]) -> Int[Tensor, " F"]:
    """Stable order by slot, then by falling score."""
    if score.dtype == torch.float64:
        order = torch.argsort(score, descending=True, stable=True)
        return order[torch.argsort(slot[order], stable=True)]
    # One sort: the bits of a float rise with it as an integer does, those of a negative one fall.
    bits = (score.float() + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0: they are equal
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return torch.argsort((slot << 32) - rising, stable=True)
