"""The paper's solver: log-domain Sinkhorn sweeps, differentiated by unrolling them."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dotmoe.transport.plan import Capacity, TransportPlan, check_problem


def sinkhorn(
    affinity: Float[Tensor, "*L N E"], *, capacity: Capacity, tau: float, num_sweeps: int = 50
) -> TransportPlan:
    """Soft balanced assignment by a fixed number of Sinkhorn sweeps.

    Entropic transport (eq:entropic_ot) in the form eq:sinkhorn_form, solved by alg:sinkhorn:

        u = -logsumexp_e(A / tau + v);  v = log(s) - logsumexp_n(A / tau + u);  repeat
        M = exp(A / tau + u + v)

    Args:
        affinity: Score A of neuron n for expert e, larger is closer. float32 or float64.
        capacity: Neurons of every expert (s), or of each; they sum to N.
        tau: Temperature > 0, in units of affinity. Small is sharp.
        num_sweeps: Row-then-column sweeps, at least 1. Paper: 50 (tab:hyperparams_moefication).

    Returns:
        A plan whose columns sum to the capacity up to rounding, because the last half-sweep is
        theirs; rows are off by at most `marginal_error`. Where A / tau is wide (standard deviation
        100) 50 sweeps leave errors of several percent: use `balanced_plan` there.

    Raises:
        ValueError: As `check_problem`, or num_sweeps below 1.

    Gradient:
        Through the unrolled sweeps, which are computed again in the backward pass: memory grows
        with num_sweeps * N * E of one layer, not of all.

    Example:
        >>> sinkhorn(torch.zeros(4, 2), capacity=2, tau=0.1, num_sweeps=1).plan.sum(dim=0)
        tensor([2., 2.])
    """
    capacity_E = check_problem(affinity, capacity=capacity, tau=tau)
    if num_sweeps < 1:
        raise ValueError(f"num_sweeps is {num_sweeps}, but at least 1 sweep is needed.")
    solved = [
        checkpoint(
            _swept, layer, capacity_E, tau, num_sweeps, use_reentrant=False,
            preserve_rng_state=False,
        )
        for layer in affinity.reshape(-1, *affinity.shape[-2:])
    ]  # fmt: skip
    plan = torch.stack([plan_NE for plan_NE, _ in solved]).reshape(affinity.shape)
    potential = torch.stack([v_E for _, v_E in solved]).detach()
    sums = plan.detach().sum(dim=-2, dtype=torch.float64)
    column_error = (sums - capacity_E).abs() / capacity_E
    row_error = (plan.detach().sum(dim=-1, dtype=torch.float64) - 1.0).abs()
    return TransportPlan(
        plan=plan,
        potential=potential.reshape(sums.shape),
        marginal_error=torch.maximum(column_error.amax(dim=-1), row_error.amax(dim=-1)),
        num_passes=2 * num_sweeps,
    )


def _swept(
    affinity_NE: Tensor, capacity_E: Tensor, tau: float, num_sweeps: int
) -> tuple[Tensor, Tensor]:
    """Plan and column potential of one layer."""
    logits_NE = affinity_NE / tau
    v_E = log_capacity_E = capacity_E.to(logits_NE.dtype).log()
    for _ in range(num_sweeps):
        u_N = -torch.logsumexp(logits_NE + v_E, dim=-1)
        v_E = log_capacity_E - torch.logsumexp(logits_NE + u_N.unsqueeze(-1), dim=-2)
    return torch.exp(logits_NE + u_N.unsqueeze(-1) + v_E), v_E
