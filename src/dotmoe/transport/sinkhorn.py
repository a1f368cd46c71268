"""The paper's solver: log-domain Sinkhorn sweeps, differentiated by unrolling them."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dotmoe.transport.plan import Capacity, TransportPlan, checked_problem


def sinkhorn(
    affinity: Float[Tensor, "*L N E"], *, capacity: Capacity, tau: float, num_sweeps: int = 50
) -> TransportPlan:
    """Soft balanced assignment by a fixed number of Sinkhorn sweeps.

    Entropic transport (eq:entropic_ot) in the form eq:sinkhorn_form, solved by alg:sinkhorn:

        u = -logsumexp_e(A / tau + v);  v = log(s) - logsumexp_n(A / tau + u);  repeat
        M = exp(A / tau + u + v)

    Args:
        affinity: Score A of neuron n for expert e, larger is closer. float32 or float64.
        capacity: Neurons of every expert (s), or of each.
        tau: Temperature > 0, in units of affinity. Small is sharp.
        num_sweeps: Row-then-column sweeps, at least 1. Paper: 50 (tab:hyperparams_moefication).

    Returns:
        A plan whose columns sum to the capacity up to rounding, because the last half-sweep is
        theirs; rows are off by at most `marginal_error`. Where A / tau is wide (standard deviation
        100) 50 sweeps leave errors of several percent: use `balanced_plan` there.

        The gradient goes through the unrolled sweeps, which are computed again in the backward
        pass: memory grows with num_sweeps * N * E of one layer, not of all.

    Raises:
        ValueError: As `checked_problem`.

    Example:
        >>> sinkhorn(torch.zeros(4, 2), capacity=2, tau=0.1, num_sweeps=1).plan.sum(dim=0)
        tensor([2., 2.])
    """
    capacity_E = checked_problem(affinity, capacity, tau)

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
    sums = plan.detach().sum(dim=-2, dtype=torch.float64)
    column_error = (sums - capacity_E).abs() / capacity_E
    row_error = (plan.detach().sum(dim=-1, dtype=torch.float64) - 1.0).abs()
    return TransportPlan(
        plan=plan,
        potential=potential.detach().reshape(sums.shape),
        marginal_error=torch.maximum(column_error.amax(dim=-1), row_error.amax(dim=-1)),
        num_passes=2 * num_sweeps,
    )
