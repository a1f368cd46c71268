"""The gradient of a balanced plan from its optimality conditions, without stored iterates."""

from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from dotmoe.transport.laplacian import plan_laplacian, solve_laplacian
from dotmoe.transport.plan import column_sums


def attach_gradient(
    affinity_LNE: Float[Tensor, "L N E"], plan_LNE: Float[Tensor, "L N E"], tau: float
) -> Float[Tensor, "L N E"]:
    """The solved plan, as a differentiable function of the affinities it was solved for.

    Differentiating softmax rows and column constraints of eq:entropic_ot at the solution M, with
    G = dL/dM, r = (M*G) 1 and c = (M*G)^T 1 (products entry for entry):

        (diag(M^T 1) - M^T M) b = c - M^T r,    a = r - M b
        dL/dA = (M*G - M*(a 1^T + 1 b^T)) / tau

    Args:
        affinity_LNE: Affinities A.
        plan_LNE: Plan M solved for them, detached, rows summing to 1.
        tau: Temperature > 0, in units of affinity.

    Returns:
        `plan_LNE` with a gradient function; first derivatives only.

    Gradient:
        Exact up to the marginal error of the plan. Finite for every plan: directions in which the
        plan is saturated beyond the rounding of its dtype are damped, and their share of the
        gradient is below that rounding.
    """
    return cast(Tensor, _ImplicitPlan.apply(affinity_LNE, plan_LNE, tau))  # type: ignore[no-untyped-call]


class _ImplicitPlan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, affinity_LNE: Tensor, plan_LNE: Tensor, tau: float) -> Tensor:
        output_LNE = plan_LNE.detach()
        ctx.save_for_backward(output_LNE)
        ctx.tau = tau
        return output_LNE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (plan_LNE,) = ctx.saved_tensors
        capacity = plan_LNE.shape[-2] // plan_LNE.shape[-1]
        # M*(G - r) in one go: c - M^T r is the small difference of two large sums.
        gradient_LNE = grad_outputs[0]
        row_LN1 = (plan_LNE * gradient_LNE).sum(dim=-1, keepdim=True)
        flow_LNE = plan_LNE * (gradient_LNE - row_LN1)
        potential_LE = solve_laplacian(
            plan_laplacian(plan_LNE),
            column_sums(plan_LNE, capacity).clamp_min(1e-3 * capacity),
            column_sums(flow_LNE, capacity),
            damping=torch.finfo(plan_LNE.dtype).eps,
        )
        potential_L1E = potential_LE.to(plan_LNE.dtype).unsqueeze(-2)
        with torch.autocast(device_type=plan_LNE.device.type, enabled=False):
            mean_LN1 = plan_LNE @ potential_L1E.mT
        flow_LNE -= plan_LNE * (potential_L1E - mean_LN1)
        return flow_LNE.div_(ctx.tau), None, None
