"""The gradient of a balanced plan from its optimality conditions, without stored iterates."""

from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from dotmoe.transport.blocks import blocks
from dotmoe.transport.laplacian import FactoredLaplacian, factor_laplacian, plan_laplacian
from dotmoe.transport.plan import column_sums

REFINEMENTS = 4
"""Solutions with a Hessian from near the plan before that of the plan itself is formed."""


def attach_gradient(
    affinity_LNE: Float[Tensor, "L N E"],
    plan_LNE: Float[Tensor, "L N E"],
    tau: float,
    hessian: FactoredLaplacian,
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
        hessian: The system's matrix at a plan near M, which saves forming it again; scale 0 where
            there is none.

    Returns:
        `plan_LNE` with a gradient function; first derivatives only.

    Gradient:
        Exact up to the marginal error of the plan. Finite for every plan: directions in which the
        plan is saturated beyond the rounding of its dtype are damped, and their share of the
        gradient is below that rounding.
    """
    attached = _ImplicitPlan.apply(  # type: ignore[no-untyped-call]
        affinity_LNE, plan_LNE, tau, hessian.factor_LEE, hessian.scale_LE
    )
    return cast(Tensor, attached)


class _ImplicitPlan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        affinity_LNE: Tensor,
        plan_LNE: Tensor,
        tau: float,
        factor_LEE: Tensor,
        scale_LE: Tensor,
    ) -> Tensor:
        output_LNE = plan_LNE.detach()
        ctx.save_for_backward(output_LNE, factor_LEE, scale_LE)
        ctx.tau = tau
        return output_LNE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        plan_LNE, factor_LEE, scale_LE = ctx.saved_tensors
        flow_LNE, net_LE = _row_balanced(plan_LNE, grad_outputs[0], ctx.tau)
        hessian = FactoredLaplacian(factor_LEE=factor_LEE, scale_LE=scale_LE)
        small_L1 = 64 * torch.finfo(plan_LNE.dtype).eps * net_LE.abs().amax(dim=-1, keepdim=True)
        usable = bool((scale_LE > 0).all())
        for _ in range(REFINEMENTS if usable else 0):
            left_LE = _balance_columns(flow_LNE, plan_LNE, hessian.solve(net_LE))
            if bool((left_LE.abs() <= small_L1).all()):
                return flow_LNE, None, None, None, None
            shrunk = left_LE.abs().amax() < 0.1 * net_LE.abs().amax()
            net_LE = left_LE
            if not shrunk:
                break
        hessian = factor_laplacian(
            plan_laplacian(plan_LNE),
            torch.full_like(net_LE, plan_LNE.shape[-2] // plan_LNE.shape[-1]),
            damping=torch.finfo(plan_LNE.dtype).eps,
        )
        _balance_columns(flow_LNE, plan_LNE, hessian.solve(net_LE))
        return flow_LNE, None, None, None, None


def _row_balanced(plan_LNE: Tensor, gradient_LNE: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """(M*G - M*(r 1^T)) / tau, whose rows sum to zero, and its column sums."""
    capacity = plan_LNE.shape[-2] // plan_LNE.shape[-1]
    flow_LNE = torch.empty_like(plan_LNE)
    net_LE = plan_LNE.new_zeros(plan_LNE.shape[::2], dtype=torch.float64)
    for layers, rows in blocks(plan_LNE.shape, plan_LNE.device):
        plan, gradient = plan_LNE[layers, rows], gradient_LNE[layers, rows]
        # M*(G - r) in one go: c - M^T r is the small difference of two large sums.
        row_sums = (plan * gradient).sum(dim=-1, keepdim=True)
        flow = torch.sub(gradient, row_sums, out=flow_LNE[layers, rows])
        flow *= 1.0 / tau
        flow *= plan
        net_LE[layers] += column_sums(flow, capacity)
    return flow_LNE, net_LE


def _balance_columns(flow_LNE: Tensor, plan_LNE: Tensor, potential_LE: Tensor) -> Tensor:
    """Subtract M*(1 b^T - (M b) 1^T) from a flow, in place; what its columns still sum to."""
    capacity = plan_LNE.shape[-2] // plan_LNE.shape[-1]
    left_LE = torch.zeros_like(potential_LE)
    potential_L1E = potential_LE.to(plan_LNE.dtype).unsqueeze(-2)
    with torch.autocast(device_type=plan_LNE.device.type, enabled=False):
        for layers, rows in blocks(plan_LNE.shape, plan_LNE.device):
            plan, potential = plan_LNE[layers, rows], potential_L1E[layers]
            flow = flow_LNE[layers, rows]
            flow.addcmul_(plan, potential - plan @ potential.mT, value=-1.0)
            left_LE[layers] += column_sums(flow, capacity)
    return left_LE
