"""Greedy rounding of a plan to one expert a neuron, as a stable matching found in parallel."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def greedy_assignment(plan: Float[Tensor, "*L N E"], *, capacity: int) -> Int[Tensor, "*L N"]:
    """Hard assignment M of eq:assignment_ste: the paper's greedy selection, without its sort.

    Defined by a serial loop over all entries of a layer, largest first, ties by flat index
    n * E + e: assign neuron n to expert e if n is free and e has room. Both sides rank their
    entries in that one order, so the outcome is the only stable matching, and deferred acceptance
    reaches it: every free neuron proposes to its best expert that would still take it, and every
    expert keeps the `capacity` best it has seen.

    Args:
        plan: Any finite scores, larger is closer; usually a plan with entries in [0, 1].
        capacity: Neurons in one expert (s); capacity * E must equal N.

    Returns:
        Expert of each neuron, 0 to E - 1, exactly `capacity` neurons each; equal to the serial
        loop entry for entry, ties included, on every device. Deterministic.

    Raises:
        ValueError: N is not capacity * E, or an entry is NaN or infinite.

    Gradient:
        None; combine with the soft plan as in eq:assignment_ste.

    Example:
        >>> greedy_assignment(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), capacity=1)
        tensor([0, 1])
    """
    *leading, num_neurons, num_experts = plan.shape
    if capacity < 1 or num_neurons != capacity * num_experts:
        raise ValueError(
            f"{num_neurons} neurons do not fill {num_experts} experts of {capacity}: "
            "N must be capacity * E."
        )
    if not bool(torch.isfinite(plan).all()):
        raise ValueError("plan contains NaN or infinity; greedy rounding needs finite entries.")
    scores_RE = plan.detach().reshape(-1, num_experts)
    matching = _Matching(scores_RE, num_neurons, capacity)
    while matching.free.numel():
        matching.propose()
    return matching.expert_of_row().reshape(*leading, num_neurons)


class _Matching:
    """Deferred acceptance; rows are the neurons of all layers, each layer has its own experts.

    Every expert starts full of placeholders that score -infinity, so it never has to be asked
    whether it has room.
    """

    def __init__(self, scores_RE: Float[Tensor, "R E"], num_neurons: int, capacity: int) -> None:
        num_rows, self.num_experts = scores_RE.shape
        self.scores_RE = scores_RE
        self.num_neurons = num_neurons
        self.nobody = num_rows
        """Row number of a placeholder: above every row, so it loses ties."""
        num_slots = num_rows // capacity
        # Members of each expert, best first: the last column is what a newcomer has to beat.
        self.member_score = scores_RE.new_full((num_slots, capacity), -torch.inf)
        self.member_row = torch.full_like(self.member_score, self.nobody, dtype=torch.long)
        self.free = torch.arange(num_rows, device=scores_RE.device)

    def propose(self) -> None:
        """One round: all free rows propose, the experts asked keep their best."""
        score, slot = self._wishes()
        asked, turn = torch.unique(slot, return_inverse=True)
        capacity = self.member_row.shape[1]
        old_turn = torch.arange(len(asked), device=turn.device).repeat_interleave(capacity)
        turns = torch.cat([old_turn, turn])
        scores = torch.cat([self.member_score[asked].flatten(), score])
        rows = torch.cat([self.member_row[asked].flatten(), self.free])
        order = torch.argsort(rows)
        order = order[torch.argsort(scores[order], descending=True, stable=True)]
        order = order[torch.argsort(turns[order], stable=True)]
        size = torch.bincount(turns, minlength=len(asked))
        start = (size.cumsum(0) - size)[turns[order]]
        kept = torch.arange(len(order), device=order.device) - start < capacity
        self.member_score[asked] = scores[order[kept]].view(-1, capacity)
        self.member_row[asked] = rows[order[kept]].view(-1, capacity)
        refused = rows[order[~kept]]
        self.free = refused[refused != self.nobody]

    def _wishes(self) -> tuple[Float[Tensor, " F"], Int[Tensor, " F"]]:
        """Score and number of the expert that each free row proposes to.

        What an expert asks for only rises, so an expert whose worst member beats a row now would
        refuse it for ever: no record of refusals is needed.
        """
        layer = self.free // self.num_neurons
        worst_score = self.member_score[:, -1].view(-1, self.num_experts)[layer]
        worst_row = self.member_row[:, -1].view(-1, self.num_experts)[layer]
        scores = self.scores_RE[self.free]
        tie_won = (scores == worst_score) & (self.free.unsqueeze(-1) < worst_row)
        scores.masked_fill_(~((scores > worst_score) | tie_won), -torch.inf)
        best = scores.amax(dim=-1, keepdim=True)
        # argmax may return any of several equal entries; the definition wants the first.
        columns = torch.arange(self.num_experts, device=scores.device)
        expert = torch.where(scores == best, columns, self.num_experts).amin(dim=-1)
        return best.squeeze(-1), layer * self.num_experts + expert

    def expert_of_row(self) -> Int[Tensor, " R"]:
        """The assignment, once nobody is free."""
        num_slots, capacity = self.member_row.shape
        expert = torch.arange(num_slots, device=self.member_row.device) % self.num_experts
        result = torch.empty(self.nobody, dtype=torch.long, device=self.member_row.device)
        result[self.member_row.flatten()] = expert.repeat_interleave(capacity)
        return result
