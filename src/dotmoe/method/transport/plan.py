"""Transport plans: their type, input checks, the paper's Sinkhorn sweeps, and greedy rounding."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Capacity = int | Sequence[int] | Int[Tensor, " E"]
"""Number of neurons of every expert (s), or one number per expert; they sum to N."""


@dataclass(frozen=True)
class TransportPlan:
    """Soft balanced assignments of N neurons to E experts, one for each leading index."""

    plan: Float[Tensor, "*L N E"]
    """Entries in [0, 1]; rows sum to 1, columns to the capacity. Carries the gradient."""
    potential: Float[Tensor, "*L E"]
    """Column log-potential v with plan = softmax_e(A / tau + v); detached, float64 from Newton."""
    marginal_error: Float[Tensor, "*L"]
    """Largest |column sum - capacity| / capacity (and row error, for Sinkhorn) of `plan`."""
    num_passes: int
    """Number of passes of the solver over all N x E entries."""


def checked_capacity(scores: Float[Tensor, "*L N E"], capacity: Capacity) -> Int[Tensor, " E"]:
    """Capacity of each expert, on the device of the scores.

    Raises a `ValueError` if they do not sum to N, one is below 1, or a score is not finite.
    """
    num_neurons, num_experts = scores.shape[-2:]
    capacity_E = torch.as_tensor(capacity, device=scores.device).expand(num_experts)
    if int(capacity_E.min()) < 1 or int(capacity_E.sum()) != num_neurons:
        raise ValueError(
            f"{num_neurons} neurons do not fill {num_experts} experts of {capacity}: "
            "N must be the sum of the capacities."
        )
    # A NaN makes both extremes NaN: one pass is enough, without a mask as large as the scores.
    extremes = scores.detach().aminmax() if scores.numel() else ()
    if not all(bool(extreme.isfinite()) for extreme in extremes):
        raise ValueError("scores contain NaN or infinity, so no assignment exists.")
    return capacity_E


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
        with num_sweeps * N * E of one layer, not of all layers.

    Example:
        >>> sinkhorn(torch.zeros(4, 2), capacity=2, tau=0.1, num_sweeps=1).plan.sum(dim=0)
        tensor([2., 2.])
    """
    capacity_E = checked_capacity(affinity, capacity)

    def swept(affinity_1NE: Tensor) -> tuple[Tensor, Tensor]:
        logits_1NE = affinity_1NE / tau
        log_capacity_1E = capacity_E.to(logits_1NE.dtype).log().unsqueeze(0)
        v_1E = log_capacity_1E
        for _ in range(num_sweeps):
            u_1N1 = -torch.logsumexp(logits_1NE + v_1E, dim=-1, keepdim=True)
            v_1E = log_capacity_1E - torch.logsumexp(logits_1NE + u_1N1, dim=-2)
        return torch.exp(logits_1NE + u_1N1 + v_1E), v_1E

    layers = affinity.reshape(-1, *affinity.shape[-2:])
    solved = [(layers[:0], layers[:0, 0])]
    for layer in layers.unsqueeze(1):
        solved.append(checkpoint(swept, layer, use_reentrant=False, preserve_rng_state=False))
    plan, potential = (torch.cat(parts) for parts in zip(*solved, strict=True))
    plan = plan.reshape(affinity.shape)
    column_sums, row_sums = (plan.detach().sum(dim, dtype=torch.float64) for dim in (-2, -1))
    column_error = (column_sums - capacity_E).abs() / capacity_E
    row_error = (row_sums - 1.0).abs()
    return TransportPlan(
        plan=plan,
        potential=potential.detach().reshape(column_sums.shape),
        marginal_error=torch.maximum(column_error.amax(dim=-1), row_error.amax(dim=-1)),
        num_passes=2 * num_sweeps,
    )


def greedy_assignment(plan: Float[Tensor, "*L N E"], *, capacity: Capacity) -> Int[Tensor, "*L N"]:
    """Hard assignment M of eq:assignment_ste: the paper's greedy selection, without its sort.

    It is defined by a serial loop over all entries of a layer, largest first, ties by flat index
    n * E + e: assign neuron n to expert e if n is free and e has room. Neurons and experts rank
    entries in this same order, so the result is the only stable matching, and deferred acceptance
    finds it: every free neuron proposes to the best expert that would still take it, and every
    expert keeps the best neurons that it has room for.

    The plan may be any finite scores, larger is closer; for errors see `checked_capacity`.

    Returns:
        Expert of each neuron, 0 to E - 1; every expert is exactly full. It equals the result of the
        serial loop entry for entry, ties included, on every device, and has no gradient.

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
    # The score that a newcomer must beat: any score does, until the slot refuses its first row.
    worst_score_S = scores_RE.new_full(capacity_S.shape, -torch.inf)
    worst_row_S = torch.zeros_like(capacity_S)
    while True:
        # Slots with too many proposals keep the best; only these slots are processed.
        size_S = torch.bincount(slot_R, minlength=len(capacity_S))
        crowded_S = size_S > capacity_S
        # In row order, which the stable sorts keep; then by falling score, and by slot.
        rows = crowded_S[slot_R].nonzero().squeeze(-1)
        rows = rows[score_R[rows].argsort(descending=True, stable=True)]
        rows = rows[slot_R[rows].argsort(stable=True)]
        size_S = torch.where(crowded_S, size_S, 0)
        slots = slot_R[rows]
        place = torch.arange(len(rows), device=rows.device) - (size_S.cumsum(0) - size_S)[slots]
        last = rows[place == capacity_S[slots] - 1]
        worst_score_S[slot_R[last]], worst_row_S[slot_R[last]] = score_R[last], last
        free = rows[place >= capacity_S[slots]]
        if not len(free):
            return (slot_R % num_experts).reshape(*leading, num_neurons)
        # Every refused row proposes to the best slot that would still take it. A slot's worst row
        # only improves, so a slot whose worst row beats a free row now would refuse it for ever: no
        # record of refusals is needed.
        layer = free // num_neurons
        worst_score = worst_score_S.view(-1, num_experts)[layer]
        worst_row = worst_row_S.view(-1, num_experts)[layer]
        scores = scores_RE[free]
        lost = (scores == worst_score) & (free.unsqueeze(-1) > worst_row)
        scores.masked_fill_((scores < worst_score) | lost, -torch.inf)
        score_R[free], expert = scores.max(dim=-1)
        slot_R[free] = layer * num_experts + expert
