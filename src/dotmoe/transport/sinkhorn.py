"""The paper's solver: log-domain Sinkhorn sweeps, differentiated by unrolling them."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from dotmoe.transport.plan import TransportPlan, check_affinity, column_sums


def sinkhorn(
    affinity: Float[Tensor, "*L N E"], *, capacity: int, tau: float, num_sweeps: int = 50
) -> TransportPlan:
    """Soft balanced assignment by a fixed number of Sinkhorn sweeps.

    Entropic transport (eq:entropic_ot) in the form eq:sinkhorn_form, solved by alg:sinkhorn:

        u = -logsumexp_e(A / tau + v);  v = log(s) - logsumexp_n(A / tau + u);  repeat
        M = exp(A / tau + u + v)

    Args:
        affinity: Score A of neuron n for expert e, larger is closer. float32 or float64.
        capacity: Neurons in one expert (s); capacity * E must equal N.
        tau: Temperature > 0, in units of affinity. Small is sharp.
        num_sweeps: Row-then-column sweeps, at least 1. Paper: 50 (tab:hyperparams_moefication).

    Returns:
        A plan whose columns sum to the capacity up to rounding, because the last half-sweep is
        theirs; rows are off by at most `marginal_error`. Where A / tau is wide (standard deviation
        100) 50 sweeps leave errors of several percent: use `balanced_plan` there.

    Raises:
        ValueError: As `check_affinity`, or num_sweeps below 1.

    Gradient:
        Through the unrolled sweeps; memory grows with num_sweeps * N * E.

    Example:
        >>> sinkhorn(torch.zeros(4, 2), capacity=2, tau=0.1, num_sweeps=1).plan.sum(dim=0)
        tensor([2., 2.])
    """
    check_affinity(affinity, capacity=capacity, tau=tau)
    if num_sweeps < 1:
        raise ValueError(f"num_sweeps is {num_sweeps}, but at least 1 sweep is needed.")
    logits_NE = affinity / tau
    log_capacity = math.log(capacity)
    v_E = torch.full_like(logits_NE[..., 0, :], log_capacity)
    for _ in range(num_sweeps):
        u_N = -torch.logsumexp(logits_NE + v_E.unsqueeze(-2), dim=-1)
        v_E = log_capacity - torch.logsumexp(logits_NE + u_N.unsqueeze(-1), dim=-2)
    plan_NE = torch.exp(logits_NE + u_N.unsqueeze(-1) + v_E.unsqueeze(-2))
    column_error = (column_sums(plan_NE.detach(), capacity) - capacity).abs() / capacity
    row_error = (plan_NE.detach().sum(dim=-1, dtype=torch.float64) - 1.0).abs()
    return TransportPlan(
        plan=plan_NE,
        potential=v_E.detach(),
        marginal_error=torch.maximum(column_error.amax(dim=-1), row_error.amax(dim=-1)),
        num_passes=2 * num_sweeps,
    )
