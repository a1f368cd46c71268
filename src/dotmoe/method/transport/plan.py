"""Transport plans: their type, input checks, the paper's Sinkhorn sweeps, and greedy rounding."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dotmoe.common.device import memory_of

CACHED_ELEMENTS = 2**17
"""Elements of a block on the CPU: half a MiB in float32, so that a few blocks share a cache."""
SWEEPS_IN_MEMORY = 16
"""A GPU could hold the sweeps of so many groups of layers, unless a group is a single layer."""

Capacity = int | Sequence[int] | Int[Tensor, " E"]
"""Number of neurons of every expert (s), or one number per expert; they sum to N."""


@dataclass(frozen=True)
class TransportPlan:
    """Soft balanced assignments of N neurons to E experts, one for each leading index."""

    entries: Float[Tensor, "*L N E"]
    """Numbers in [0, 1]; rows sum to 1, columns to the capacity. Carries the gradient."""
    potential: Float[Tensor, "*L E"]
    """Column log-potential v of M = softmax_e(A / tau + v); detached, float64 from Newton."""
    marginal_error: Float[Tensor, "*L"]
    """Largest |column sum - capacity| / capacity (and row error, for Sinkhorn) of `entries`."""
    num_passes: int
    """Number of passes of the solver over all N x E entries."""


def checked_capacity(scores: Float[Tensor, "*L N E"], capacity: Capacity) -> Int[Tensor, " E"]:
    """Capacity of each expert, on the host.

    Raises a `ValueError` if they do not sum to N, or one is below 1.
    """
    num_neurons, num_experts = scores.shape[-2:]
    capacity_E = torch.as_tensor(capacity, device="cpu").expand(num_experts)
    if int(capacity_E.min()) < 1 or int(capacity_E.sum()) != num_neurons:
        raise ValueError(
            f"{num_neurons} neurons do not fill {num_experts} experts of {capacity}: "
            "N must be the sum of the capacities."
        )
    return capacity_E


def extremes_of(scores: Float[Tensor, "*L N E"]) -> list[tuple[float, float]]:
    """Smallest and largest score of each problem; one copy to the host.

    Raises a `ValueError` if a score is not finite.
    """
    # A NaN makes both extremes NaN: one pass is enough, without a mask as large as the scores.
    problems = scores.detach().reshape(-1, *scores.shape[-2:])
    if not len(problems):
        return []
    extremes = [torch.stack(scores_NE.aminmax()) for scores_NE in problems]
    pairs: list[tuple[float, float]] = [(low, high) for low, high in torch.stack(extremes).tolist()]
    if not all(math.isfinite(low) and math.isfinite(high) for low, high in pairs):
        raise ValueError("scores contain NaN or infinity, so no assignment exists.")
    return pairs


def sinkhorn(
    affinity: Float[Tensor, "*L N E"], *, capacity: Capacity, tau: float, num_sweeps: int = 50
) -> TransportPlan:
    """Soft balanced assignment by a fixed number of Sinkhorn sweeps.

    Entropic transport (eq:entropic_ot) in the form eq:sinkhorn_form, solved by alg:sinkhorn:

        u = -logsumexp_e(A / tau + v);  v = log(s) - logsumexp_n(A / tau + u);  repeat
        M = exp(A / tau + u + v)

    Arguments and errors are those of `balanced_plan`; `num_sweeps`, at least 1, counts
    row-then-column sweeps (paper: 50, tab:hyperparams_moefication).

    Returns:
        A plan whose columns sum to the capacity up to rounding, because the last half-sweep scales
        them; rows are off by at most `marginal_error`. If A / tau is wide (standard deviation 100),
        50 sweeps leave errors of several percent: use `balanced_plan` instead.

    Gradient:
        Flows through the unrolled sweeps, which are recomputed in the backward pass: memory grows
        with num_sweeps * N * E of the layers that are solved at once (`layers_at_once`).

    Example:
        >>> sinkhorn(torch.zeros(4, 2), capacity=2, tau=0.1, num_sweeps=1).entries.sum(dim=0)
        tensor([2., 2.])
    """
    capacity_E = checked_capacity(affinity, capacity).to(affinity.device)
    extremes_of(affinity)

    def swept(affinity_CNE: Tensor) -> tuple[Tensor, Tensor]:
        logits_CNE = affinity_CNE / tau
        log_capacity_1E = capacity_E.to(logits_CNE.dtype).log().unsqueeze(0)
        v_C1E = log_capacity_1E.unsqueeze(0)
        for _ in range(num_sweeps):
            u_CN1 = -torch.logsumexp(logits_CNE + v_C1E, dim=-1, keepdim=True)
            v_C1E = log_capacity_1E - torch.logsumexp(logits_CNE + u_CN1, dim=-2, keepdim=True)
        return torch.exp(logits_CNE + u_CN1 + v_C1E), v_C1E.squeeze(-2)

    layers = affinity.reshape(-1, *affinity.shape[-2:])
    solved = [(layers[:0], layers[:0, 0])]
    for group in torch.split(layers, layers_at_once(layers, num_sweeps)):
        solved.append(checkpoint(swept, group, use_reentrant=False, preserve_rng_state=False))
    plan, potential = (torch.cat(parts) for parts in zip(*solved, strict=True))
    plan = plan.reshape(affinity.shape)
    column_sums, row_sums = (plan.detach().sum(dim, dtype=torch.float64) for dim in (-2, -1))
    column_error = (column_sums - capacity_E).abs() / capacity_E
    row_error = (row_sums - 1.0).abs()
    return TransportPlan(
        entries=plan,
        potential=potential.detach().reshape(column_sums.shape),
        marginal_error=torch.maximum(column_error.amax(dim=-1), row_error.amax(dim=-1)),
        num_passes=2 * num_sweeps,
    )


def layers_at_once(layers: Float[Tensor, "L N E"], num_sweeps: int) -> int:
    """How many layers' sweeps are computed together, at least 1: the numbers are the same.

    A GPU waits for each operation to be launched, and one on more layers takes hardly longer. The
    backward pass of a sweep holds two tensors as large as the plan. On a CPU the cache bounds it.
    """
    entries = max(1, layers.shape[1] * layers.shape[2])
    if layers.device.type != "cuda":
        return max(1, CACHED_ELEMENTS // entries)
    bytes_of_a_layer = 2 * (num_sweeps + 1) * entries * layers.element_size()
    return max(1, memory_of(layers.device) // SWEEPS_IN_MEMORY // bytes_of_a_layer)


def greedy_assignment(plan: Float[Tensor, "*L N E"], *, capacity: Capacity) -> Int[Tensor, "*L N"]:
    """Hard assignment M of eq:assignment_ste: the paper's greedy selection, without its sort.

    It is defined by a serial loop over all entries of a layer, largest first, ties by flat index
    n * E + e: assign neuron n to expert e if n is free and e has room. Neurons and experts rank
    entries in this same order, so the result is the only stable matching, and deferred acceptance
    finds it: every free neuron proposes to the best expert that would still take it, and every
    expert keeps the best neurons that it has room for.

    The plan may be any finite scores, larger is closer; for errors see `checked_capacity` and
    `extremes_of`. A device is waited for once, and twice for each round of proposals.

    Returns:
        Expert of each neuron, 0 to E - 1; every expert is exactly full. It equals the result of the
        serial loop entry for entry, ties included, on every device, and has no gradient.

    Example:
        >>> greedy_assignment(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), capacity=1)
        tensor([0, 1])
    """
    capacity_E = checked_capacity(plan, capacity).to(plan.device)
    extremes_of(plan)
    *leading, num_neurons, num_experts = plan.shape
    proposals = _Proposals(plan.detach().reshape(-1, num_experts), capacity_E, num_neurons)
    while True:
        refused = proposals.refused_rows()
        if refused is None:
            return (proposals.slot_R % num_experts).reshape(*leading, num_neurons)
        proposals.propose_again(refused)


class _Proposals:
    """Deferred acceptance in all layers at once: the slot to which each row proposes now.

    Rows (R) are the neurons of all layers; a slot (S) is one expert of one layer.
    """

    def __init__(self, scores_RE: Tensor, capacity_E: Tensor, num_neurons: int) -> None:
        num_rows, self.num_experts = scores_RE.shape
        self.num_neurons = num_neurons
        self.scores_RE = scores_RE
        self.capacity_S = capacity_E.repeat(num_rows // num_neurons)
        # The first proposal of all rows at once; `max` returns the first of equal entries.
        self.score_R, expert_R = scores_RE.max(dim=-1)
        rows_R = torch.arange(num_rows, device=scores_RE.device)
        self.slot_R = rows_R // num_neurons * self.num_experts + expert_R
        self.one_R = torch.ones_like(self.slot_R)
        # The score that a newcomer must beat: any score does, until the slot refuses its first row.
        # The last entry is of no slot.
        num_entries = len(self.capacity_S) + 1
        self.worst_score_S = scores_RE.new_full((num_entries,), -torch.inf)
        self.worst_row_S = self.capacity_S.new_zeros(num_entries)

    def refused_rows(self) -> Tensor | None:
        """Keep the best rows of each slot and give all others; None if every slot has room.

        Only slots with too many proposals are processed.
        """
        zeros_S = torch.zeros_like(self.capacity_S)
        size_S = zeros_S.scatter_add_(0, self.slot_R, self.one_R)
        crowded_S = size_S > self.capacity_S
        # In row order, which the stable sorts keep; then by falling score, and by slot.
        rows = crowded_S[self.slot_R].nonzero().squeeze(-1)
        if not len(rows):
            return None
        rows = rows[self.score_R[rows].argsort(descending=True, stable=True)]
        rows = rows[self.slot_R[rows].argsort(stable=True)]
        size_S = torch.where(crowded_S, size_S, 0)
        slots = self.slot_R[rows]
        place = torch.arange(len(rows), device=rows.device) - (size_S.cumsum(0) - size_S)[slots]
        # The last row that has room is the slot's worst; picking it out would be one more wait.
        num_slots = len(self.capacity_S)
        slot_of_last = torch.where(place == self.capacity_S[slots] - 1, slots, num_slots)
        self.worst_score_S[slot_of_last] = self.score_R[rows]
        self.worst_row_S[slot_of_last] = rows
        return rows[place >= self.capacity_S[slots]]

    def propose_again(self, free: Tensor) -> None:
        """Let every refused row propose to the best slot that would still take it.

        A slot's worst row only improves, so a slot whose worst row beats a free row now would
        refuse it for ever: no record of refusals is needed.
        """
        layer = free // self.num_neurons
        worst_score = self.worst_score_S[:-1].view(-1, self.num_experts)[layer]
        worst_row = self.worst_row_S[:-1].view(-1, self.num_experts)[layer]
        scores = self.scores_RE[free]
        lost = (scores == worst_score) & (free.unsqueeze(-1) > worst_row)
        scores.masked_fill_((scores < worst_score) | lost, -torch.inf)
        self.score_R[free], expert = scores.max(dim=-1)
        self.slot_R[free] = layer * self.num_experts + expert
