"""Greedy rounding of a plan to one expert a neuron, as a stable matching found in parallel."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dotmoe.transport.plan import Capacity, check_scores


def greedy_assignment(plan: Float[Tensor, "*L N E"], *, capacity: Capacity) -> Int[Tensor, "*L N"]:
    """Hard assignment M of eq:assignment_ste: the paper's greedy selection, without its sort.

    Defined by a serial loop over all entries of a layer, largest first, ties by flat index
    n * E + e: assign neuron n to expert e if n is free and e has room. Both sides rank their
    entries in that one order, so the outcome is the only stable matching, and deferred acceptance
    reaches it: every free neuron proposes to its best expert that would still take it, and every
    expert keeps as many of the best as it has room for.

    Args:
        plan: Any finite scores, larger is closer; usually a plan with entries in [0, 1].
        capacity: Neurons of every expert (s), or of each; they sum to N.

    Returns:
        Expert of each neuron, 0 to E - 1, every expert exactly full; equal to the serial loop entry
        for entry, ties included, on every device. Deterministic.

    Raises:
        ValueError: As `check_scores`.

    Gradient:
        None; combine with the soft plan as in eq:assignment_ste.

    Example:
        >>> greedy_assignment(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), capacity=1)
        tensor([0, 1])
    """
    capacity_E = check_scores(plan, capacity)
    *leading, num_neurons, num_experts = plan.shape
    scores_RE = plan.detach().reshape(-1, num_experts)
    matching = _Matching(scores_RE, num_neurons, capacity_E)
    while matching.refuse():
        matching.propose()
    return (matching.slot_R % num_experts).reshape(*leading, num_neurons)


class _Matching:
    """Deferred acceptance; rows are the neurons of all layers, a slot is one expert of one layer.

    Only slots that are asked by more rows than they have room for do any work, and only rows they
    refuse look at their scores a second time.
    """

    def __init__(
        self, scores_RE: Float[Tensor, "R E"], num_neurons: int, capacity_E: Int[Tensor, " E"]
    ) -> None:
        num_rows, self.num_experts = scores_RE.shape
        self.scores_RE = scores_RE
        self.num_neurons = num_neurons
        self.capacity_S = capacity_E.repeat(num_rows // num_neurons)
        # The first proposal of all rows at once; `max` returns the first of equal entries.
        self.score_R, expert_R = scores_RE.max(dim=-1)
        rows_R = torch.arange(num_rows, device=scores_RE.device)
        self.slot_R = rows_R // num_neurons * self.num_experts + expert_R
        self.free = rows_R[:0]
        # What a newcomer has to beat: anything, until the slot refuses its first row.
        self.worst_score = scores_RE.new_full(self.capacity_S.shape, -torch.inf)
        self.worst_row = torch.zeros_like(self.worst_score, dtype=torch.long)

    def refuse(self) -> bool:
        """Slots asked by too many keep their best; whether anyone was refused."""
        size = torch.bincount(self.slot_R, minlength=self.worst_score.numel())
        crowded = size > self.capacity_S
        # In row order, which the stable sorts keep among equals.
        rows = crowded[self.slot_R].nonzero().squeeze(-1)
        rows = rows[_best_first(self.slot_R[rows], self.score_R[rows])]
        size = torch.where(crowded, size, 0)
        slots = self.slot_R[rows]
        place = torch.arange(len(rows), device=rows.device) - (size.cumsum(0) - size)[slots]
        last = rows[place == self.capacity_S[slots] - 1]
        self.worst_score[self.slot_R[last]] = self.score_R[last]
        self.worst_row[self.slot_R[last]] = last
        self.free = rows[place >= self.capacity_S[slots]]
        return self.free.numel() > 0

    def propose(self) -> None:
        """Every refused row asks the best slot that would still take it.

        What a slot asks for only rises, so one whose worst row beats a free row now would refuse
        it for ever: no record of refusals is needed.
        """
        layer = self.free // self.num_neurons
        worst_score = self.worst_score.view(-1, self.num_experts)[layer]
        worst_row = self.worst_row.view(-1, self.num_experts)[layer]
        scores = self.scores_RE[self.free]
        lost = (scores == worst_score) & (self.free.unsqueeze(-1) > worst_row)
        scores.masked_fill_((scores < worst_score) | lost, -torch.inf)
        self.score_R[self.free], expert = scores.max(dim=-1)
        self.slot_R[self.free] = layer * self.num_experts + expert


def _best_first(slot: Int[Tensor, " F"], score: Float[Tensor, " F"]) -> Int[Tensor, " F"]:
    """Stable order by slot, then by falling score."""
    if score.dtype == torch.float64:
        order = torch.argsort(score, descending=True, stable=True)
        return order[torch.argsort(slot[order], stable=True)]
    # One sort: the bits of a float rise with it as an integer does, those of a negative one fall.
    bits = (score.float() + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0: they are equal
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return torch.argsort((slot << 32) - rising, stable=True)
